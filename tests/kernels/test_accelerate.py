"""`accelerate`: same parameters, same state, same numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
import shardwise.cli.app
from shardwise.kernels import timed_layers
from shardwise.kernels.accelerate import TUNED, TunedConv2d, convolutions
from shardwise.kernels.dispatch import KernelChoice
from shardwise.kernels.timed_layers import AppliedReLU

CHOICES = [
    KernelChoice("base", "base", "base"),
    KernelChoice("convgemm", "deconvgemm", "convgemm_trans"),
    KernelChoice("winograd4", "winograd2", "winograd4"),
    KernelChoice("direct", "convgemm", "reindex"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding="same"),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4, bias=False),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("layout", ["keep", "channels_last", "auto"])
def test_the_copy_shares_parameters_and_computes_the_same(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        timed_layers, "MARGIN", float("inf")
    )  # our kernels, however slow they are here
    model, x = network().double(), torch.randn(4, 3, 12, 10, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    fast = shardwise.accelerate(model, x, layout=layout)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(fast.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for a, b in zip(model.parameters(), fast.parameters(), strict=True):
        assert a is b
    assert type(model[0]) is nn.Conv2d and type(model[2]) is nn.ReLU
    assert not model._forward_pre_hooks and model[0](x).is_contiguous()
    if layout != "auto":  # where torch may win the whole step
        assert isinstance(fast[0], TunedConv2d)
        assert type(fast[2]) is AppliedReLU and fast[1].relu
    assert type(fast[3]) is nn.Conv2d  # padding by name stays with the stock operator
    model[5].p = fast[5].p = 0.0  # dropout draws its numbers in the order of memory
    for a, b in zip(gradients(model, x), gradients(fast, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_three_steps_of_training_are_the_same_with_any_kernels(choice: KernelChoice) -> None:
    def trained(own: bool) -> nn.Module:
        model, x = network(), torch.randn(4, 3, 12, 10, generator=torch.Generator().manual_seed(2))
        if own:
            model = shardwise.accelerate(model, x)
            for module in model.modules():
                if isinstance(module, TunedConv2d):
                    module.choice = choice
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            gradients(model, x)
            torch.manual_seed(3)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    stock, own = trained(False), trained(True)
    for (name, a), b in zip(stock.state_dict().items(), own.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_only_convolutions_that_the_kernels_know_are_seen() -> None:
    seen = convolutions(network(), torch.randn(4, 3, 12, 10))
    assert [one.name for one in seen] == ["0", "4"]
    assert [one.first for one in seen] == [True, False]


def test_another_batch_size_and_evaluation_work() -> None:
    model, x = network(), torch.randn(4, 3, 12, 10)
    fast = shardwise.accelerate(model, x).eval()
    model.eval()
    for batch in (0, 1, 7):
        x = torch.randn(batch, 3, 12, 10)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)


VOLUMES = nn.Sequential(
    *(nn.Conv3d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, groups=8, padding=1)),
    *(nn.Conv3d(8, 6, 2, stride=2), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 3, 1)),
)
LINES = nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 4, 3, stride=2))


@pytest.mark.parametrize("layout", ["keep", "channels_last", "auto"])
@pytest.mark.parametrize(("model", "sizes"), [(VOLUMES, (6, 8, 7)), (LINES, (31,))])
def test_volumes_and_lines_compute_the_same(
    model: nn.Module, sizes: tuple[int, ...], layout: str
) -> None:
    model, x = copy.deepcopy(model).double(), torch.randn(3, 2, *sizes, dtype=torch.float64)
    assert len(convolutions(model, x)) == sum(isinstance(m, tuple(TUNED)) for m in model)
    fast = shardwise.accelerate(model, x, layout=layout)
    if layout != "auto":
        assert type(fast[0]) is TUNED[type(model[0])] and fast[0].relu
        fast[0].choice = KernelChoice("convgemm", "deconvgemm", "convgemm_trans")
    assert list(fast.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(fast(x), model(x))
    for a, b in zip(gradients(model, x), gradients(fast, x), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(fast[:2](x[0]), model[:2](x[0]))  # without a batch


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match="layout='fast' is not one of"):
        shardwise.accelerate(network(), torch.randn(1, 3, 12, 10), layout="fast")


def test_the_command_prints_a_row_for_each_direction(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        shardwise.cli.app.main(["kernels", "digits", "--batch", "2", "--threads", "1"])
    out, _ = capfd.readouterr()
    assert not ended.value.code
    assert "stock" in out and out.count(" dw ") == out.count(" fwd ") >= 2


def test_a_parallel_model_uses_the_kernels_that_were_timed() -> None:
    model, x = network(), torch.randn(4, 3, 12, 10)
    plan = shardwise.Plan.uniform(shardwise.capture(model, x))
    parallel = shardwise.parallelize(network(), plan)
    with shardwise.tuning():
        torch.testing.assert_close(parallel.eval()(x), model.eval()(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("margin", [0.0, float("inf")])
def test_norms_and_pools_are_ours_only_where_that_is_faster(
    margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_layers, "MARGIN", margin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 9, 2))
    x = torch.randn(4, 3, 6, 6)
    fast = shardwise.accelerate(model, x, layout="channels_last")
    assert [type(fast[i]) is not type(model[i]) for i in range(4)] == [margin > 0] * 2 + [False] * 2
    assert model[0].num_batches_tracked == 0
    for a, b in zip(gradients(model, x), gradients(fast, x), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(model[0].num_batches_tracked, fast[0].num_batches_tracked)


def fused_for_inference(model: nn.Module) -> nn.Module:
    """As a user would: batch norm becomes part of the convolution before it."""
    model = copy.deepcopy(model).eval()
    model[0] = nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    model[1] = nn.Identity()
    return model


def test_a_relu_stays_where_another_layer_takes_the_place_of_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timed_layers, "MARGIN", float("inf"))
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 4, 3), nn.ReLU()),
    )
    x = torch.randn(4, 3, 10, 10)
    fast = shardwise.accelerate(model, x)
    assert fast[1].relu and fast[3].relu
    close = {"rtol": 1e-3, "atol": 1e-4}
    truth = fused_for_inference(model)(x)
    torch.testing.assert_close(fused_for_inference(fast)(x), truth, **close)
    fast[3] = model[3]
    torch.testing.assert_close(fast.eval()(x), model.eval()(x), **close)


def test_a_compiled_copy_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(4, 3, 10, 10)
    fast = shardwise.accelerate(model, x)
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
