"""Every command of the documents, run as a user types it: on the CPU here, on GPUs in tests/gpu/roads."""
