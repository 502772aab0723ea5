"""An image pipeline of diffusers whose decoder runs on all workers, exactly.

    python examples/10_decode_images.py

One call makes `pipe.vae` parallel; the pipeline is used as before. A small one with random weights
stands for a real one. Beside it: the same latents decoded in tiles, as is done where one device has
too little memory, and the gradient of a reward on the decoded image. Errors are relative.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import shardwise

sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # nothing here needs it
try:
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
except ImportError:
    print("this example needs diffusers: pip install diffusers")
    raise SystemExit from None


def pipeline() -> Any:
    """Class labels to images of 96 x 96, with the same random weights wherever it is made."""
    torch.manual_seed(0)
    denoiser = DiTTransformer2DModel(2, 8, 4, 8, num_layers=1, sample_size=48, norm_num_groups=4)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1}
    blocks |= {"up_block_types": ("UpDecoderBlock2D",) * 2, "block_out_channels": (32, 32)}
    vae = AutoencoderKL(**blocks, latent_channels=4, norm_num_groups=8)
    pipe = DiTPipeline(denoiser.double().eval(), vae.double().eval(), DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any) -> torch.Tensor:
    """An unmodified pipeline: all workers draw the same noise."""
    seed = torch.Generator().manual_seed(1)
    made = pipe([3], generator=seed, num_inference_steps=2, output_type="np").images
    return torch.from_numpy(made)


def gradient(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """Of a reward on the decoded image: how bright it is."""
    z = z.clone().requires_grad_()
    vae.decode(z).sample.mean().backward()
    return z.grad


def error(found: torch.Tensor, expected: torch.Tensor) -> str:
    return f"{float((found - expected).abs().max() / expected.abs().max()):.1e}"


def work() -> dict[str, str]:
    """What every worker does, and how far it ends up from one device."""
    pipe, alone = pipeline(), pipeline()
    z = torch.randn(1, 4, 37, 51, dtype=torch.float64)  # another size, uneven
    decoder = shardwise.parallelize_decoder(pipe.vae)
    found = {"the image of the pipeline": error(image(pipe), image(alone))}
    found["split of most layers"] = decoder.plan.main_split
    with torch.inference_mode():
        expected = alone.vae.decode(z).sample
        found["latents of another size"] = error(pipe.vae.decode(z).sample, expected)
        alone.vae.enable_tiling()
        alone.vae.tile_latent_min_size, alone.vae.tile_sample_min_size = 24, 48
        found["the same in tiles, on one device"] = error(alone.vae.decode(z).sample, expected)
        alone.vae.disable_tiling()
    found["gradient of a reward"] = error(gradient(pipe.vae, z), gradient(alone.vae, z))
    decoder.restore()  # one device decodes again
    return found


if __name__ == "__main__":
    for what, figure in shardwise.run_local(work, 2)[0].items():
        print(f"{what}: {figure}")
