"""The state of an installation: what is available, what would not be reached, what was measured here."""
