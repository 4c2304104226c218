"""The command `wanshim`."""
