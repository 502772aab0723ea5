"""Batch norm, ReLU and a pointwise convolution as one: what torch's own three layers give."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from convolutions import ISAS, chosen
from shardwise.kernels import native
from shardwise.kernels.norm_conv import FusedSequential, NativeNormConv

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def layers(c: int, f: int, bias: bool = False, **how: object) -> nn.Sequential:
    torch.manual_seed(0)
    row = nn.Sequential(
        nn.BatchNorm2d(c, **how), nn.ReLU(inplace=True), nn.Conv2d(c, f, 1, bias=bias)
    )  # type: ignore[arg-type]
    for parameter in row[0].parameters():
        nn.init.normal_(parameter)
    return row


def as_one(row: nn.Sequential) -> nn.Sequential:
    twin = copy.deepcopy(row)
    twin.__class__, twin[2].after_norm = FusedSequential, True  # type: ignore[assignment]
    return twin


def images(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(sizes, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 3 + 1
    return x.contiguous(memory_format=torch.channels_last)


def ran(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__ == "NativeNormConvBackward"


def compare(row: nn.Sequential, twin: nn.Sequential, x: torch.Tensor, steps: int = 2) -> bool:
    """Trains both for some steps; whether the kernel of ours did the last one."""
    limit, optimizers = TOLERANCE[x.dtype], []
    for model in (row, twin):
        kept = [p for p in model.parameters() if p.requires_grad]
        optimizers.append(torch.optim.SGD(kept, lr=0.1))
    for _ in range(steps):
        results = []
        for model, optimizer in zip((row, twin), optimizers, strict=True):
            own = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            optimizer.zero_grad()
            y = model(own)
            y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape))
            grads = [p.grad for p in model.parameters()]
            results.append([y, own.grad, *grads, *model.buffers()])
            optimizer.step()
        for one, other in zip(*results, strict=True):
            if one is None:
                assert other is None
                continue
            scale = float(one.detach().abs().max()) if one.numel() else 0.0
            torch.testing.assert_close(other, one, rtol=0, atol=limit * max(scale, 1.0))
    return ran(y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "sizes", [(3, 7, 3, 5, 5), (2, 64, 8, 8, 128), (5, 353, 4, 3, 40), (1, 1, 9, 2, 1)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_it_trains_as_the_three_layers_do(
    isa: str, dtype: torch.dtype, sizes: tuple[int, ...], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with chosen(SHARDWISE_ISA=isa):
            *x_sizes, filters = sizes
            row = layers(sizes[1], filters, bias=filters == 5).to(dtype)
            used = compare(row, as_one(row), images(*x_sizes, dtype=dtype))
            assert used == (sizes[1] > 1)  # of one channel, both layouts are the same
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "how", [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 0.1}]
)
def test_norms_of_every_kind_are_taken(how: dict[str, object]) -> None:
    row = layers(6, 4, **how)
    assert compare(row, as_one(row), images(3, 6, 4, 4))


def test_what_it_does_not_take_is_left_to_the_three_layers() -> None:
    row = layers(6, 4)
    twin, x = as_one(row), images(3, 6, 4, 4)
    assert not compare(layers(6, 4, momentum=None), as_one(layers(6, 4, momentum=None)), x)
    assert not compare(row, twin, x.contiguous())
    assert not compare(row.eval(), twin.eval(), x)
    row.train(), twin.train()
    with pytest.raises(ValueError, match="more than 1 value"):
        twin(images(1, 6, 1, 1))
    with pytest.raises(RuntimeError, match=r"running_mean|channels"):
        twin(images(2, 5, 4, 4))
    empty = images(0, 6, 4, 4)
    torch.testing.assert_close(twin(empty), row(empty))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert twin(x).dtype == torch.bfloat16


def test_whoever_watches_a_layer_sees_what_goes_through_it() -> None:
    twin, x, seen = as_one(layers(6, 4)), images(3, 6, 4, 4), []
    assert ran(twin(x))
    with twin[1].register_forward_hook(lambda _module, _inputs, y: seen.append(y)):
        assert not ran(twin(x))
    assert len(seen) == 1 and float(seen[0].detach().min()) == 0
    hook = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(0))
    with hook:
        assert not ran(twin(x))
    assert ran(twin(x))
    twin[2].forward = lambda input: input  # type: ignore[method-assign]
    assert twin(x).shape == x.shape


def test_frozen_parameters_and_checkpoints_train_the_same() -> None:
    row, x = layers(6, 4), images(3, 6, 4, 4)
    for parameter in (row[0].weight, row[2].weight):
        parameter.requires_grad_(False)
    assert compare(row, as_one(row), x)
    one, other = layers(6, 4, momentum=1.0), as_one(layers(6, 4, momentum=1.0))
    for model in (one, other):
        own = x.clone().requires_grad_()
        (checkpoint(model, own, use_reentrant=False) ** 2).sum().backward()  # type: ignore[operator]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_without_gradients_the_statistics_are_kept_all_the_same() -> None:
    row = layers(6, 4)
    twin, x = as_one(row), images(3, 6, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), row(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(twin.state_dict(), row.state_dict())
    torch.testing.assert_close(pickle.loads(pickle.dumps(twin))(x), twin(x))


def test_gradients_of_first_and_second_order_are_right() -> None:
    x = images(2, 3, 2, 3, dtype=torch.float64).requires_grad_()
    given = [torch.randn(size, dtype=torch.float64) for size in ((3,), (3,), (2, 3, 1, 1), (2,))]
    inputs = (x, *(t.requires_grad_() for t in given))

    def function(*t: torch.Tensor) -> torch.Tensor:
        return NativeNormConv.apply(*t, (None, None, 0.0), 1e-5)  # type: ignore[return-value]

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_a_changed_input_is_refused_in_the_backward_pass() -> None:
    twin = as_one(layers(6, 4))
    x = images(3, 6, 4, 4).requires_grad_() * 1
    y = twin(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
