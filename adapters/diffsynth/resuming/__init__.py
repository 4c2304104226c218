"""What `diffsynth.resume` needs of DiffSynth and accelerate: what a run is, and its loop."""
