"""A script of a user of diffusers that decodes and encodes a video on the device it has, alone or on all ranks.

Writes frames.RANK.pt and latent.RANK.pt.
"""

import os
import sys

import torch
import torch.distributed as dist

from tests.distributed.decoding.tiny import make_latent, make_vae, make_video

layout, dtype, batch = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if "RANK" in os.environ:
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
vae = make_vae(layout, dtype).to(device)
with torch.inference_mode():
    for frames in (3, 5):  # the second call has another size
        images = vae.decode(make_latent(frames, batch=batch, dtype=dtype).to(device)).sample
        latent = vae.encode(make_video(4 * frames - 3, batch=batch, dtype=dtype).to(device)).latent_dist.parameters
rank = os.environ.get("RANK", "0")
torch.save(images.cpu(), f"frames.{rank}.pt")
torch.save(latent.cpu(), f"latent.{rank}.pt")
