"""`python -m wanshim`."""

from wanshim.cli.main import entry

entry()
