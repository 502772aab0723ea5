"""The operators of torch on top of the kernels: gradients, shapes, and what falls back."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from convolutions import CASES, chosen
from kept_columns import KeptColumns
from shardwise.kernels import conv, dispatch, native
from shardwise.kernels.conv_shape import memory_format
from shardwise.kernels.ops import STOCK_OF

NAMES = {"fwd": "convgemm", "dx": "deconvgemm", "dw": "convgemm_trans"}


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("sizes", [(7,), (7, 6), (4, 3, 3)], ids=str)
def test_gradients_of_first_and_second_order_are_right(sizes: tuple[int, ...]) -> None:
    window, stride = [3, 3, 2][: len(sizes)], (2, 1, 1)[: len(sizes)]
    x, w, bias = tensors((2, 4, *sizes), (4, 2, *window), (4,))

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return conv(*inputs, stride=stride, padding=1, groups=2, **NAMES)

    assert torch.autograd.gradcheck(function, (x, w, bias))
    assert torch.autograd.gradgradcheck(function, (x, w, bias))


@pytest.mark.parametrize("sizes", [(7,), (7, 6), (4, 3, 5)], ids=str)
def test_the_operators_keep_the_rules_of_torch(sizes: tuple[int, ...]) -> None:
    ones = [1] * len(sizes)
    x, w, bias = tensors((2, 3, *sizes), (4, 3, *[3] * len(sizes)), (4,))
    rest = (ones, ones, ones, 1, *NAMES.values())
    torch.library.opcheck(torch.ops.shardwise.conv.default, (x, w, bias, *rest, False))
    dy = torch.randn(2, 4, *sizes, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.shardwise.conv_dx.default, (dy, x, w, *rest))
    torch.library.opcheck(torch.ops.shardwise.conv_dw.default, (dy, x, w, *rest))


def test_a_fused_relu_has_the_gradient_of_a_relu() -> None:
    x, w, bias = tensors((2, 3, 7, 6), (4, 3, 3, 3), (4,))
    ours = torch.autograd.grad(conv(x, w, bias, relu=True, **NAMES).sum(), (x, w, bias))
    stock = torch.nn.functional.conv2d(x, w, bias).relu().sum()
    for a, b in zip(ours, torch.autograd.grad(stock, (x, w, bias)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("kernel", "direction"), CASES)
def test_any_kernel_may_be_named_for_any_convolution(
    kernel: str, direction: str, last: bool
) -> None:
    """One that does not take the shape gives way to another; the layout of x is kept."""
    x, w = tensors((2, 4, 9, 8), (6, 2, 3, 3))
    x = x.to(memory_format=dispatch.memory_format(last)).detach().requires_grad_()
    y = conv(x, w, stride=2, dilation=2, groups=2, **{**NAMES, direction: kernel})
    stock = torch.nn.functional.conv2d(x, w, None, 2, 0, 2, 2)
    assert y.is_contiguous(memory_format=dispatch.memory_format(last))
    torch.testing.assert_close(y, stock)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, w), dy)
    for a, b in zip(ours, torch.autograd.grad(stock, (x, w), dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (
            torch.randn(2, 3, 8, 8, dtype=torch.bfloat16),
            torch.randn(4, 3, 3, 3, dtype=torch.bfloat16),
        ),
        (torch.randn(0, 3, 8, 8), torch.randn(4, 3, 3, 3)),
        (torch.randn(2, 3, 8, 8)[:, :, ::2, 1:], torch.randn(4, 3, 3, 3)),
        (torch.randn(2, 3, 8, 8).permute(0, 1, 3, 2), torch.randn(3, 4, 3, 3).transpose(0, 1)),
        (torch._neg_view(torch.randn(2, 3, 8, 8)), torch.randn(4, 3, 3, 3)),
        (torch.randn(2, 3, 8, 8), torch._neg_view(torch.randn(4, 3, 3, 3))),
    ],
    ids=["bfloat16", "no samples", "slices", "transposed", "negative x", "negative w"],
)
def test_odd_tensors_give_what_the_stock_operator_gives(x: torch.Tensor, w: torch.Tensor) -> None:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y, stock = conv(x, w, padding=1, **NAMES), torch.nn.functional.conv2d(x, w, None, 1, 1)
    torch.testing.assert_close(y, stock)
    ours = torch.autograd.grad(y.sum(), (x, w))
    for a, b in zip(ours, torch.autograd.grad(stock.sum(), (x, w)), strict=True):
        torch.testing.assert_close(a, b)


VOLUMES = [  # x, w, stride, padding, dilation, groups: uneven everywhere, one voxel, one slice
    ((2, 6, 5, 7, 9), (9, 2, 3, 2, 3), (2, 1, 2), (1, 0, 2), (1, 2, 1), 3),
    ((1, 3, 4, 4, 4), (5, 3, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    ((1, 4, 1, 1, 1), (4, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 4),
    ((3, 2, 1, 8, 9), (7, 2, 1, 3, 3), (3, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    ((2, 4, 11), (6, 2, 4), (3,), (2,), (2,), 2),
    ((1, 5, 6), (5, 1, 3), (1,), (1,), (1,), 5),
    ((0, 3, 4, 4, 4), (5, 3, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("x_size", "w_size", "stride", "padding", "dilation", "groups"), VOLUMES)
def test_lines_and_volumes_are_those_of_the_stock_operator(
    x_size, w_size, stride, padding, dilation, groups, last, dtype
) -> None:  # type: ignore[no-untyped-def]
    """In each direction, by each kernel; the layout of x is kept."""
    x, w, bias = tensors(x_size, w_size, w_size[:1], dtype=dtype)
    form = memory_format(last, x.ndim)
    x = x.detach().contiguous(memory_format=form).requires_grad_()
    settings = (stride, padding, dilation, groups)
    stock = STOCK_OF[w.ndim](x, w, bias, *settings).relu()
    dy = torch.randn_like(stock)
    truth = torch.autograd.grad(stock, (x, w, bias), dy)
    loose = 1e-4 if dtype == torch.float32 else 1e-10
    for kernel, direction in CASES:
        y = conv(x, w, bias, *settings, relu=True, **{**NAMES, direction: kernel})
        assert not y.numel() or y.is_contiguous(memory_format=form)
        ours = torch.autograd.grad(y, (x, w, bias), dy)
        for a, b in zip((y, *ours), (stock, *truth), strict=True):
            torch.testing.assert_close(a, b, rtol=loose, atol=loose)


@pytest.mark.parametrize("last", [False, True])
def test_base_with_kept_columns_is_a_convolution(last: bool) -> None:
    if native.library() is None:
        pytest.skip("no native kernels here")
    x, w, bias = tensors((2, 4, 7, 6), (6, 4, 3, 3), (6,))
    x = x.to(memory_format=dispatch.memory_format(last)).detach().requires_grad_()
    y = KeptColumns.apply(x, w, bias, ((2, 1), (1, 0), (1, 1), 1))
    stock = torch.nn.functional.conv2d(x, w, bias, (2, 1), (1, 0))
    torch.testing.assert_close(y, stock)
    dy = torch.randn_like(stock)
    ours = torch.autograd.grad(y, (x, w, bias), dy)
    for a, b in zip(ours, torch.autograd.grad(stock, (x, w, bias), dy), strict=True):
        torch.testing.assert_close(a, b)


def test_without_the_library_the_stock_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "library", lambda: None)
    x, w = tensors((1, 3, 5, 5), (4, 3, 3, 3))
    torch.testing.assert_close(conv(x, w), torch.nn.functional.conv2d(x, w))


def test_a_missing_library_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setenv("SHARDWISE_ISA", "portable")
    native.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="PyTorch's own operators") as said:
            assert native.library() is None and native.library() is None
        assert len(said) == 1
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


def test_a_library_that_is_not_wanted_is_not_missed() -> None:
    with chosen(SHARDWISE_ISA="none"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None


def test_a_workspace_that_cannot_be_had_means_another_kernel() -> None:
    lib = native.library()
    if lib is None:
        pytest.skip("no native kernels here")
    x, w = tensors((1, 3, 5, 5), (4, 3, 3, 3))
    asked: list[str] = []

    class Poor:
        def run(self, kernel: str, *rest: object) -> int:
            asked.append(kernel)
            return native.NO_MEMORY if kernel != "convgemm" else lib.run(kernel, *rest)  # type: ignore

    patch = pytest.MonkeyPatch()
    patch.setattr(dispatch, "library", Poor)
    with patch.context():
        y = conv(x, w, fwd="base")
    patch.undo()
    assert asked == ["base", "direct", "depthwise", "convgemm"]
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w))


def test_an_unknown_kernel_is_named() -> None:
    x, w = tensors((1, 3, 5, 5), (4, 3, 3, 3))
    with pytest.raises(ValueError, match="fwd='fast' is no kernel; choose from stock"):
        conv(x, w, fwd="fast")


def test_export_and_compile_see_the_operator() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 3, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return conv(x, self.w, stride=2, padding=1, **NAMES)

    net, x = Net(), torch.randn(2, 3, 8, 8)
    exported = torch.export.export(net, (x,))
    assert "shardwise.conv" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), net(x))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))


def test_functional_transforms_get_the_stock_operator() -> None:
    x, w = (t.detach() for t in tensors((2, 3, 7, 6), (4, 3, 3, 3)))
    ours = torch.func.grad(lambda w: conv(x, w, relu=True, **NAMES).square().sum())(w)
    stock = torch.func.grad(lambda w: torch.conv2d(x, w).relu().square().sum())(w)
    torch.testing.assert_close(ours, stock)


def test_fake_tensors_and_modes_that_watch_operators_see_the_operator() -> None:
    x, w = tensors((2, 3, 7, 6), (4, 3, 3, 3))
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        y = conv(x, w, padding=1, **NAMES)
    assert "shardwise.conv.default" in seen
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake = conv(mode.from_tensor(x), mode.from_tensor(w), padding=1, **NAMES)
    assert fake.shape == y.shape and fake.stride() == y.stride()


def test_autocast_gets_the_stock_operator() -> None:
    x, w, bias = tensors((2, 3, 7, 6), (4, 3, 3, 3), (4,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, stock = conv(x, w, bias, relu=True, **NAMES), torch.conv2d(x, w, bias).relu()
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, stock)
    gradients = (torch.autograd.grad(y.float().sum(), (x, w, bias)) for y in (ours, stock))
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
