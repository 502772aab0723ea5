"""A video decoder that works on chunks of frames, each from where the one before left off.

    python examples/09_streaming_decoder.py

Causal convolutions look back at frames of the chunk before. Where a module keeps these in an
attribute, every call depends on earlier ones, and capturing it is refused. Here they are what
they are: inputs and outputs. The parallel decoder then gives, chunk by chunk, what one device does.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad, silu

import shardwise
from shardwise import CaptureError

CHANNELS, CHUNK, CHUNKS = 6, 4, 3


class CausalConv(nn.Conv3d):
    """Sees two frames of the past, which it is given and hands on."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat([past, x], 2)
        return super().forward(pad(x, (1, 1, 1, 1))), x[:, :, -2:]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CausalConv(4, CHANNELS, 3), CausalConv(CHANNELS, 3, 3)
        self.up = nn.Upsample(scale_factor=(1, 2, 2))

    def forward(
        self, z: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, first = self.first(z, first)
        y, second = self.second(self.up(silu(y)), second)
        return y, first, second


class Forgetful(nn.Module):
    """The same idea with its past in an attribute: it cannot be captured for many calls."""

    past: torch.Tensor | None = None

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        past = torch.zeros_like(z[:, :, -2:]) if self.past is None else self.past
        self.past = z[:, :, -2:] + past
        return z * 2


def decode() -> float:
    """What every worker does; how far it ends up from one device."""
    torch.manual_seed(0)
    decoder = Decoder().double().eval()
    latents = torch.randn(1, 4, CHUNK * CHUNKS, 9, 7, dtype=torch.float64)
    start = torch.zeros(1, 4, 2, 9, 7).double(), torch.zeros(1, CHANNELS, 2, 18, 14).double()
    graph = shardwise.capture(decoder, latents[:, :, :CHUNK], *start, training=False)
    parallel = shardwise.parallelize(decoder, shardwise.Plan.uniform(graph, h=3)).eval()
    worst, mine, theirs = 0.0, start, start
    with torch.inference_mode():
        for chunk in latents.split(CHUNK, 2):
            found, *mine = parallel(chunk, *mine)
            expected, *theirs = decoder(chunk, *theirs)
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


if __name__ == "__main__":
    errors = shardwise.run_local(decode, 3)
    print(f"{CHUNKS} chunks on 3 workers, largest relative error {max(errors):.1e}")
    try:
        shardwise.capture(Forgetful(), torch.zeros(1, 4, CHUNK, 9, 7))
    except CaptureError as refusal:
        print(refusal)
