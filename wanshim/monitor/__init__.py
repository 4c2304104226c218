"""Looks at the logs of training runs: reads them, judges them, shows them. Imports neither torch nor a framework."""
