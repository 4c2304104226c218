"""How wanshim gets into processes that never say `import wanshim`."""
