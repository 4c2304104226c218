"""The state of a training run: what it holds, how it is kept on disk, and how a run goes on from it."""
