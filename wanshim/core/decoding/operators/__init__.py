"""The arithmetic of a decoder: strict operators, equal bit for bit to the framework, and fast ones."""
