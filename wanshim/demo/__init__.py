"""Programs of `wanshim demo`: the real frameworks on a real clip, with tiny random weights."""
