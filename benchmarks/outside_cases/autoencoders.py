"""Autoencoders of diffusers, image and video, small and with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from outside_cases.importing import uncompiled_torchvision


@dataclass(frozen=True)
class Family:
    """A class of diffusers, how a small one is made, and what decoding it is given."""

    kind: str
    options: Mapping[str, Any]
    latents: tuple[int, ...]  # a shape; images and frames are cut in its last two dimensions
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of decode
    float32: bool = False  # some of its layers compute in float32 whatever they are given

    def build(self) -> nn.Module:
        with uncompiled_torchvision():
            import diffusers

            kind = getattr(diffusers, self.kind)
        diffusers.utils.logging.set_verbosity_error()  # it would speak of every cast
        torch.manual_seed(0)
        return kind(**self.options).eval()

    def of_size(self, height: int, width: int) -> tuple[int, ...]:
        return (*self.latents[:-2], height, width)


def _blocks(count: int, widths: tuple[int, ...], **others: Any) -> dict[str, Any]:
    """Encoder and decoder of images of the family of Stable Diffusion."""
    down, up = ("DownEncoderBlock2D",) * count, ("UpDecoderBlock2D",) * count
    blocks = {"down_block_types": down, "up_block_types": up, "block_out_channels": widths}
    return blocks | {"layers_per_block": 1, "norm_num_groups": 8} | others


PARTS, BOTH = ("encoder", "decoder"), ("", "decoder_")
FAMILIES = {
    "stable diffusion": Family(
        "AutoencoderKL", _blocks(3, (16, 32, 32), latent_channels=4), (1, 4, 9, 7)
    ),
    "flux 2": Family("AutoencoderKLFlux2", _blocks(2, (16, 32), latent_channels=4), (1, 4, 9, 7)),
    "vq": Family(
        "VQModel",
        _blocks(2, (16, 32), latent_channels=3, num_vq_embeddings=16),
        (1, 3, 9, 7),
        {"force_not_quantize": True},
    ),
    "tiny": Family(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
        | {"num_encoder_blocks": (1,) * 4, "num_decoder_blocks": (1,) * 4},
        (1, 4, 9, 7),
    ),
    "hunyuan image": Family(
        "AutoencoderKLHunyuanImage",
        {"in_channels": 3, "out_channels": 3, "latent_channels": 8, "sample_size": 32}
        | {"block_out_channels": (32, 32), "layers_per_block": 1, "spatial_compression_ratio": 2},
        (1, 8, 9, 7),
    ),
    "sana (dc)": Family(
        "AutoencoderDC",
        {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 4}
        | {f"{part}_block_types": ("ResBlock", "EfficientViTBlock") for part in PARTS}
        | {f"{part}_block_out_channels": (8, 16) for part in PARTS}
        | {f"{part}_layers_per_block": (1, 1) for part in PARTS}
        | {f"{part}_qkv_multiscales": ((), (5,)) for part in PARTS}
        | {"upsample_block_type": "interpolate", "downsample_block_type": "stride_conv"},
        (1, 4, 9, 7),
        float32=True,
    ),
    "stable video": Family(
        "AutoencoderKLTemporalDecoder",
        {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"latent_channels": 4, "layers_per_block": 1},
        (3, 4, 9, 7),
        {"num_frames": 3},
    ),
    "cogvideox": Family(
        "AutoencoderKLCogVideoX",
        {"down_block_types": ("CogVideoXDownBlock3D",) * 2}
        | {"up_block_types": ("CogVideoXUpBlock3D",) * 2, "block_out_channels": (8, 16)}
        | {"latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4},
        (1, 4, 3, 9, 7),
    ),
    "hunyuan video": Family(
        "AutoencoderKLHunyuanVideo",
        {"latent_channels": 4, "down_block_types": ("HunyuanVideoDownBlock3D",) * 4}
        | {"up_block_types": ("HunyuanVideoUpBlock3D",) * 4, "block_out_channels": (8,) * 4}
        | {"layers_per_block": 1, "norm_num_groups": 4},
        (1, 4, 2, 9, 7),
    ),
    "mochi": Family(
        "AutoencoderKLMochi",
        {"in_channels": 15, "out_channels": 3, "latent_channels": 4}
        | {f"{part}_block_out_channels": (32,) * 4 for part in PARTS}
        | {"layers_per_block": (1,) * 5},
        (1, 4, 2, 9, 7),
    ),
    "wan": Family(
        "AutoencoderKLWan",
        {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1}
        | {"temperal_downsample": [True]},
        (1, 4, 2, 9, 7),
    ),
    "qwen image": Family(
        "AutoencoderKLQwenImage",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1}
        | {"temperal_downsample": [False]},
        (1, 4, 1, 9, 7),
    ),
    "ltx": Family(
        "AutoencoderKLLTXVideo",
        {"latent_channels": 8, "patch_size": 1, "patch_size_t": 1}
        | {f"{part}block_out_channels": (8,) * 4 for part in BOTH}
        | {f"{part}layers_per_block": (1,) * 5 for part in BOTH}
        | {f"{part}spatio_temporal_scaling": (True, True, False, False) for part in BOTH}
        | {"decoder_inject_noise": (False,) * 5, "upsample_residual": (False,) * 4}
        | {"upsample_factor": (1,) * 4, "encoder_causal": True, "decoder_causal": False},
        (1, 8, 2, 9, 7),
        float32=True,
    ),
}
