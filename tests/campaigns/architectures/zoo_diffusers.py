"""Models of diffusers, from small configs."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.campaigns.architectures.architecture import entry, floats, numbers

Built = tuple[nn.Module, dict[str, Any]]


@entry("diffusers")
def unet_2d() -> Built:
    from diffusers import UNet2DModel

    made = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return made, {"sample": floats(3, 16, 16), "timestep": numbers(100)}


@entry("diffusers")
def unet_2d_condition() -> Built:
    from diffusers import UNet2DConditionModel

    made = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=12,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return made, {"sample": floats(4, 16, 16), "timestep": numbers(100), "encoder_hidden_states": floats(6, 12)}


@entry("diffusers")
def autoencoder_kl() -> Built:
    from diffusers import AutoencoderKL

    made = AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return made, {"sample": floats(3, 16, 16)}


@entry("diffusers")
def dit() -> Built:
    from diffusers import DiTTransformer2DModel

    made = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=4,
        sample_size=8,
        norm_num_groups=4,
        num_embeds_ada_norm=50,
    )
    return made, {"hidden_states": floats(4, 8, 8), "timestep": numbers(100), "class_labels": numbers(50)}


@entry("diffusers")
def stable_diffusion_3() -> Built:
    from diffusers import SD3Transformer2DModel

    made = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
    )
    batch = {"hidden_states": floats(4, 8, 8), "encoder_hidden_states": floats(5, 12)}
    return made, {**batch, "pooled_projections": floats(10), "timestep": numbers(100)}


@entry("diffusers")
def flux() -> Built:
    import torch
    from diffusers import FluxTransformer2DModel

    from asyncpipe import NoChunk

    made = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 4, 8),
    )
    batch = {"hidden_states": floats(16, 4), "encoder_hidden_states": floats(6, 12), "pooled_projections": floats(10)}
    places = {"img_ids": NoChunk(torch.randn(16, 3)), "txt_ids": NoChunk(torch.zeros(6, 3))}
    return made, {**batch, **places, "timestep": floats().sigmoid()}
