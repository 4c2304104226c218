"""What `wanshim demo` runs: the real frameworks on a real clip, with tiny random weights."""
