"""What the decode tests of every framework need of FastVideo."""

from __future__ import annotations

from tests.contract.decoding import Subject

SUBJECT = Subject(
    feature="fastvideo.vae_decode", target="fastvideo.models.vaes.wanvae:AutoencoderKLWan.decode", tiles=False
)
