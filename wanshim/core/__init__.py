"""What the features do. Knows torch, knows no framework, no adapter and no wrapt."""
