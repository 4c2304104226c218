"""The placement of a Wan pipeline when its DiT is split: the table, as data. Its shape is in `family.py`."""

from __future__ import annotations

from wanshim.adapters.diffsynth.splitting.family import BlockInputs, Companions, Family

FAMILY = Family(
    name="Wan",
    modules="diffsynth.models.wan_",
    blocks=("blocks",),
    exits=("head", "head_global"),  # head_global: WanToDance at another frame rate
    split_classes=(
        "diffsynth.models.wan_video_dit.WanModel",
        "diffsynth.models.wan_video_dit_s2v.WanS2VModel",
    ),
    sharded_classes=("diffsynth.models.wan_video_dit.WanModel",),
    sees_all_tokens=("animate_adapter", "vap", "dit.music_injector"),
    refused_classes={
        "LongCatVideoTransformer3DModel": "LongCat-Video keeps caches of its own on one device, outside Wan's blocks",
        "WanAnimate2Transformer": "WanAnimate2 writes key and value caches inside its blocks, all on one device",
    },
    second={"dit2": "dit", "vace2": "vace"},  # the low-noise expert of a Wan2.2 pair
    text_encoders={"text_encoder": "diffsynth.models.wan_video_text_encoder.WanTextEncoder"},
    side_models={
        "text_encoder": ("forward",),
        "image_encoder": ("encode_image",),
        "vae": ("encode", "decode", "encode_framewise", "decode_framewise"),
        "audio_encoder": ("get_audio_feats_per_inference",),
    },
    satellites=("vace", "animate_adapter", "vap", "motion_controller"),
    companions=(
        # WanToDance and S2V inject music or speech behind certain blocks
        Companions("dit", "music_injector.injector", lambda dit: dit.music_injector.injected_block_id, after=True),
        Companions("dit", "audio_injector.injector", lambda dit: dit.audio_injector.injected_block_id, after=True),
        Companions(
            "dit", "audio_injector.injector_adain_layers", lambda dit: dit.audio_injector.injected_block_id, after=True
        ),
        # Animate fuses the face's motion behind every fifth block
        Companions(
            "animate_adapter",
            "face_adapter.fuser_blocks",
            lambda adapter: {5 * i: i for i in range(len(adapter.face_adapter.fuser_blocks))},
            after=True,
        ),
        # VAP's mixture of transformers computes a block's work from its children
        Companions("vap", "blocks", lambda vap: vap.mot_layers_mapping, after=False),
    ),
    # VACE computes all its hints before the blocks; each is added behind the block it is for
    hints=(BlockInputs("vace", lambda vace: list(vace.vace_layers)),),
)
