"""What `diffsynth.model_split` needs of DiffSynth: job, families of models, loading, launch and loop."""
