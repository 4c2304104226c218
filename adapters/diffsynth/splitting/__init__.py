"""Knowledge of DiffSynth for `diffsynth.model_split`: job, families of models, loading, launch and loop."""
