"""A network of MONAI on a whole volume over three workers, instead of sliding windows.

    python examples/11_whole_volumes.py

Windows are what one device has memory for. They change the result: a voxel near the border of a
window does not see what lies beyond it, and group norms normalise every window by itself. Three
workers with a third of the volume each compute what one device would with enough memory.
"""

from __future__ import annotations

import sys

import torch

import shardwise

sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # nothing here needs it
try:
    from monai.inferers import sliding_window_inference
    from monai.networks.nets import SegResNet
except ImportError:
    print("this example needs MONAI: pip install monai")
    raise SystemExit from None

WINDOW, CLASSES = 24, 4


def network() -> torch.nn.Module:
    """With the same random weights wherever it is made."""
    torch.manual_seed(0)
    return SegResNet(3, 8, 1, CLASSES, blocks_down=(1, 1), blocks_up=(1,)).double().eval()


def volume() -> torch.Tensor:
    """Blobs in noise; 40 slices do not divide by 3 workers."""
    noise = torch.randn(1, 1, 40, 36, 28, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.avg_pool3d(noise, 5, 1, 2).double() * 5 + noise / 4


def segment() -> tuple[torch.Tensor | None, str]:
    """What every worker does; rank 0 gets the whole output."""
    model, x = network(), volume()
    graph = shardwise.capture(model, x, training=False)
    plan = shardwise.Plan.uniform(graph, d=3)  # or the best: shardwise.plan(..., inference=True)
    parallel = shardwise.parallelize(model, plan, output="one").eval()
    with torch.inference_mode():
        output = parallel(x)
    return output, "x".join(map(str, parallel.input_box(1).shape[2:]))


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    other = float((found.argmax(1) != expected.argmax(1)).double().mean())
    print(f"{name}: relative error {error:.1e}, another class for {other:.2%} of the voxels")


if __name__ == "__main__":
    ranks = shardwise.run_local(segment, 3)
    print("parts of the volume:", *(box for _, box in ranks))
    model, x = network(), volume()
    with torch.inference_mode():
        whole = model(x)
        compare("three workers", ranks[0][0], whole)
        for overlap in (0.25, 0.5, 0.75):
            found = sliding_window_inference(x, [WINDOW] * 3, 1, model, overlap, mode="gaussian")
            compare(f"windows that overlap by {overlap:.0%}", found, whole)
