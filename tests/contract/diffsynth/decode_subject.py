"""What the decode tests of every framework need of DiffSynth."""

from __future__ import annotations

from tests.contract.decoding import Subject

SUBJECT = Subject(feature="diffsynth.vae_decode", target="diffsynth.models.wan_video_vae:WanVideoVAE.decode")
