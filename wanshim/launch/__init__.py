"""How processes start: the launcher and its ranks, interpreter options, GPUs in sight, what a machine is ready for."""
