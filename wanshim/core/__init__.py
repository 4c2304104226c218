"""The work of the features. Core imports torch, and no framework, no adapter and no wrapt."""
