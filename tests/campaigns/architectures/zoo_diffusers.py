"""Models of diffusers, from small configs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncpipe import NoChunk
from tests.campaigns.architectures.architecture import entry, floats, numbers

_BLOCKS = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
_UNET = _BLOCKS | {"in_channels": 3, "out_channels": 3, "attention_head_dim": 4}
_UNET |= {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_CONDITION = _BLOCKS | {"attention_head_dim": 4, "cross_attention_dim": 12}
_CONDITION |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
_CONDITION |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
_KL = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 16}
_KL |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 4, "sample_size": 8}
_SD3 = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8}
_SD3 |= {"num_attention_heads": 2, "joint_attention_dim": 12, "caption_projection_dim": 16, "out_channels": 4}
_FLUX = {"patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
_FLUX |= {"num_attention_heads": 2, "joint_attention_dim": 12, "axes_dims_rope": (4, 4, 8)}

Batch = Callable[[], dict[str, Any]]

MODELS: dict[str, tuple[str, dict[str, Any], Batch]] = {
    "unet_2d": ("UNet2DModel", _UNET, lambda: {"sample": floats(3, 16, 16), "timestep": numbers(100)}),
    "unet_2d_condition": (
        *("UNet2DConditionModel", _CONDITION),
        lambda: {"sample": floats(4, 16, 16), "timestep": numbers(100), "encoder_hidden_states": floats(6, 12)},
    ),
    "autoencoder_kl": ("AutoencoderKL", _KL, lambda: {"sample": floats(3, 16, 16)}),
    "dit": (
        *("DiTTransformer2DModel", _DIT | {"norm_num_groups": 4, "num_embeds_ada_norm": 50}),
        lambda: {"hidden_states": floats(4, 8, 8), "timestep": numbers(100), "class_labels": numbers(50)},
    ),
    "stable_diffusion_3": (
        *("SD3Transformer2DModel", _SD3 | {"pooled_projection_dim": 10, "pos_embed_max_size": 8}),
        lambda: {
            "hidden_states": floats(4, 8, 8),
            "encoder_hidden_states": floats(5, 12),
            "pooled_projections": floats(10),
            "timestep": numbers(100),
        },
    ),
    "flux": (
        *("FluxTransformer2DModel", _FLUX | {"pooled_projection_dim": 10}),
        lambda: {
            "hidden_states": floats(16, 4),
            "encoder_hidden_states": floats(6, 12),
            "timestep": floats().sigmoid(),
            "pooled_projections": floats(10),
            "img_ids": NoChunk(torch.randn(16, 3)),
            "txt_ids": NoChunk(torch.zeros(6, 3)),
        },
    ),
}
"""By name: the class, its options, and what makes a batch."""


def _build(kind: str, options: dict[str, Any], batch: Batch) -> tuple[nn.Module, dict[str, Any]]:
    import diffusers

    return getattr(diffusers, kind)(**options), batch()


for _name, _row in MODELS.items():
    entry("diffusers", name=_name)(partial(_build, *_row))
