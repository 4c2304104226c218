"""One folder a framework, one file a feature."""
