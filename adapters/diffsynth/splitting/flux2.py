"""The placement of a FLUX.2 pipeline when its DiT is split: the table, as data. Its shape is in `family.py`.

The double blocks hand on two activations, text and image; the model itself joins them between its two lists, on
whatever device both have come to. Their modulations are computed once, before the first block, and cross as shared
inputs do. No exit: the model cuts the text off between the last block and the output layers.
"""

from __future__ import annotations

from wanshim.adapters.diffsynth.splitting.family import Family

FAMILY = Family(
    name="FLUX.2",
    modules="diffsynth.models.flux2_dit",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    exits=(),
    split_classes=("diffsynth.models.flux2_dit.Flux2DiT",),
    text_encoders={
        "text_encoder": "diffsynth.models.flux2_text_encoder.Flux2TextEncoder",
        "text_encoder_qwen3": "diffsynth.models.z_image_text_encoder.ZImageTextEncoder",
    },
    side_models={"text_encoder": ("forward",), "text_encoder_qwen3": ("forward",), "vae": ("encode", "decode")},
    pipeline_refusal=(
        "FLUX.2's double blocks hand on two activations and join them outside the blocks; a pipeline cuts at one"
    ),
)
