"""The decoder as data: its graph, how a graph is read from a VAE, and which VAE class has which reader."""
