"""The start of processes: the launcher and its ranks, interpreter options, GPUs in sight, a machine's abilities."""
