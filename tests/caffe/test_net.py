"""Nets of prototxt files compute what their layers say, on one device and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from shardwise.caffe.net import CaffeNet
from shardwise.errors import ShardwiseError
from shardwise.specs.model_spec import ModelSpec
from shardwise.training.settings import Settings
from shardwise.training.trainer import train
from shardwise.verify.by_name import VerifyRequest, verify_model

SMALL = str(Path(__file__).with_name("small_train_val.prototxt"))


def plain(net: CaffeNet, x: torch.Tensor) -> torch.Tensor:
    """The same net in plain torch up to its batch norm."""
    weights = dict(net.named_parameters())
    x = functional.conv2d(x, weights["conv1.weight"], weights["conv1.bias"], 2).relu()
    x = functional.local_response_norm(x, 5, 1e-4, 0.75, 1.0)
    x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
    own = weights["conv2_3x3.weight"], weights["conv2_3x3.bias"]
    return functional.conv2d(x, *own, padding=1, groups=2)


def test_a_net_computes_what_its_layers_say_and_batch_norm_sums_as_caffe_does() -> None:
    net = CaffeNet(SMALL).double()
    net.get_submodule("drop").p = 0.0  # type: ignore[assignment]
    batches = [torch.randn(4, 3, 35, 35, dtype=torch.float64) for _ in range(3)]
    mean, variance, factor = 0.0, 0.0, 0.0
    for batch in batches:
        x = plain(net, batch)
        mean = x.mean((0, 2, 3)) + 0.999 * mean
        variance = x.var((0, 2, 3)) + 0.999 * variance
        factor = 1 + 0.999 * factor
        expected = functional.batch_norm(x, None, None, training=True)
        expected = functional.avg_pool2d(expected, 3, 2, 1, ceil_mode=True).flatten(1)
        weights = net.get_parameter("fc.weight"), net.get_parameter("fc.bias")
        torch.testing.assert_close(net(batch), functional.linear(expected, *weights))
    norm = net.get_submodule("bn2")
    torch.testing.assert_close(norm.running_mean, mean / factor)
    torch.testing.assert_close(norm.running_var, variance / factor)


def test_a_net_on_two_workers_equals_one_device() -> None:
    [*results] = verify_model(VerifyRequest(ModelSpec(SMALL, batch=4), workers=2, num_random=2))
    assert results and all(result.passed for result in results)


def test_a_net_trains_the_same_on_one_worker_and_on_two(tmp_path: Path) -> None:
    common = {
        "model": SMALL,
        "data": "synthetic:12x3x35x35",
        "batch": 4,
        "steps": 3,
        "report": False,
    }
    losses = [
        train(Settings(**common, split=f"n={n}", precision="float64", out=str(tmp_path / str(n))))
        for n in (1, 2)
    ]
    assert losses[0][-1].loss == pytest.approx(losses[1][-1].loss, rel=1e-9)


def test_the_old_form_of_a_file_builds_the_same_net(tmp_path: Path) -> None:
    old = tmp_path / "old.prototxt"
    old.write_text(
        'input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8\n'
        'layers { name: "c" type: CONVOLUTION bottom: "data" top: "c" blobs_lr: 0 blobs_lr: 2\n'
        "  convolution_param { num_output: 4 kernel_h: 3 kernel_w: 1 stride: 2 } }\n"
        'layers { name: "r" type: RELU bottom: "c" top: "c" relu_param { negative_slope: 0.1 } }\n'
    )
    net = CaffeNet(str(old))
    assert net(torch.zeros(2, 3, 8, 8)).shape == (2, 4, 3, 4)
    assert [p.requires_grad for p in net.parameters()] == [False, True]


LAYER = 'input: "d" input_dim: [1, 3, 8, 8]\nlayer { name: "a" bottom: "d" top: "a" %s }'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LAYER % 'type: "Recurrent"', "line 2: layer 'a' is of type 'Recurrent'"),
        (LAYER % 'type: "ReLU"\n kernel: 3', "line 3: LayerParameter has no field 'kernel'"),
        (
            LAYER % 'type: "Pooling" pooling_param { pool: MIN }',
            "pool is 'MIN', and must be one of",
        ),
        (LAYER % 'type: "ReLU" bottom: "e"', "reads 'e', which is not there"),
        (LAYER % 'type: "Convolution" convolution_param { num_output: 2 }', "kernel_size"),
        (LAYER % 'type: "Softmax" top: "b"', "does not fit"),
        ('layer { name: "a"', "line 1: 'the end of the file' stands where"),
        ('layer { name "a" }', "line 1: '\"a\"' stands where ':' or '{' should"),
        ("", "there are no layers"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "net.prototxt").write_text(text)
    with pytest.raises(ShardwiseError, match=r"net\.prototxt") as caught:
        CaffeNet(str(tmp_path / "net.prototxt"))
    assert sentence in str(caught.value)
