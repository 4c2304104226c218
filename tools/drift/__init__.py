"""What upstream released, held against compat_matrix.yaml: read from wheels, nothing installed or imported."""
