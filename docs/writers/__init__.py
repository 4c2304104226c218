"""What docs/generate.py writes: tables, pages and pictures, from compat_matrix.yaml, the adapters and the records."""
