"""A framework of a few lines and an adapter package for it, installed into a folder: see `site.py`."""
