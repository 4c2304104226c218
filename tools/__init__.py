"""Maintainers' tools of a checkout, which no wheel holds: `python tools/matrix.py`, `python tools/prove.py`."""
