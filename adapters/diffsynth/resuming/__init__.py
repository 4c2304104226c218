"""Knowledge of DiffSynth and accelerate for `diffsynth.resume`: what a run is, and its loop."""
