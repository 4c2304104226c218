"""The way of wanshim into processes that never say `import wanshim`."""
