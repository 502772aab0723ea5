"""The auxiliary heads of GoogLeNet and Inception-v3."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import zoo
from shardwise.zoo.inception import Auxiliary

HEADS = [("googlenet", 64, 2), ("inception_v3", 96, 1)]


@pytest.mark.parametrize(("name", "size", "num_heads"), HEADS)
def test_training_returns_a_tuple_of_logits_and_one_output_per_head(
    name: str, size: int, num_heads: int
) -> None:
    with torch.device("meta"):
        ys = zoo.build(name, num_classes=5)(torch.empty(2, 3, size, size))
    assert type(ys) is tuple
    assert [y.shape for y in ys] == [(2, 5)] * (1 + num_heads)


@pytest.mark.parametrize(("name", "size", "num_heads"), HEADS)
def test_evaluation_returns_logits_only(name: str, size: int, num_heads: int) -> None:
    with torch.device("meta"):
        y = zoo.build(name, num_classes=5).eval()(torch.empty(2, 3, size, size))
    assert y.shape == (2, 5)


@pytest.mark.parametrize(("name", "size", "num_heads"), HEADS)
def test_training_without_heads_returns_logits_only(name: str, size: int, num_heads: int) -> None:
    with torch.device("meta"):
        y = zoo.build(name, num_classes=5, aux=False)(torch.empty(2, 3, size, size))
    assert y.shape == (2, 5)


def test_the_inception_head_pools_a_17x17_grid_by_the_published_window() -> None:
    torch.manual_seed(0)
    head = Auxiliary(8, num_classes=3).eval()
    x = torch.randn(2, 8, 17, 17)
    by_hand = head.classifier(head.convs(F.avg_pool2d(x, 5, 3)).flatten(1))
    torch.testing.assert_close(head(x), by_hand)
