"""A script of a user of diffusers that makes two videos of different sizes on the device it has; with "anew" each with
a new pipeline of the same models, as a service does.

Writes frames.0.pt.
"""

import sys

import torch

from tests.contract.diffusers import wan_pipelines

dtype, batch = getattr(torch, sys.argv[1]), int(sys.argv[2])
pipe = wan_pipelines.wan().to("cuda" if torch.cuda.is_available() else "cpu", dtype)
for frames in (9, 5):
    if "anew" in sys.argv:
        pipe = type(pipe)(**pipe.components)
        pipe.set_progress_bar_config(disable=True)
    made = wan_pipelines.generate(pipe, "wan", prompts=batch, num_frames=frames)
torch.save(made.cpu(), "frames.0.pt")
