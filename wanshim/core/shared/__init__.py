"""Helpers that several rooms need: the default store, memory of GPUs and hosts, bytes of weights, safetensors headers,
the name of the machine, files that are whole."""
