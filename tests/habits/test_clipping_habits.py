"""Norms and sums of gradients and weights, written as everybody writes them, are those of whole
tensors; what would be wrong on one rank's block of a tensor is refused."""

from __future__ import annotations

import copy
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from habits.habit import assert_refused, assert_same, image, net
from shardwise import Config, Plan, ShardwiseError, capture, parallelize
from shardwise.comm.in_process import InProcess, World

SPLIT = ["f=2", "random"]  # plans under which ranks hold blocks of weights


def backward(model: Any, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


@pytest.mark.parametrize(
    ("norm_type", "foreach"), [(2.0, None), (1.0, False), (3.0, True), (inf, True), (0.0, False)]
)
def test_torchs_clip_grad_norm_clips_by_the_norm_of_whole_gradients(
    norm_type: float, foreach: bool | None
) -> None:
    def clip(model: Any, x: torch.Tensor) -> Any:
        backward(model, x)
        return clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)

    assert_same(clip, under=SPLIT if foreach is not None else ["n=2", *SPLIT])


def test_torchs_total_norm_is_that_of_whole_gradients_and_of_weights() -> None:
    def total(model: Any, x: torch.Tensor) -> Any:
        backward(model, x)
        weights = get_total_norm([p.detach() for p in model.parameters()])
        return get_total_norm([p.grad for p in model.parameters()]), weights

    assert_same(total)


def test_clipping_by_value_and_a_part_of_the_model_is_the_same() -> None:
    def clip(model: Any, x: torch.Tensor) -> Any:
        backward(model, x)
        norm = clip_grad_norm_(model.head.parameters(), 0.1)
        clip_grad_value_(model.parameters(), 0.05)
        return norm

    assert_same(clip)


def test_norms_written_by_hand_are_those_of_whole_gradients() -> None:
    def norms(model: Any, x: torch.Tensor) -> Any:
        backward(model, x)
        grads = [p.grad for p in model.parameters()]
        return [
            torch.norm(torch.stack([g.norm() for g in grads])),
            torch.stack([torch.linalg.vector_norm(g, 1) for g in grads]),
            sum((g**2).sum() for g in grads) ** 0.5,
            sum(g.detach().data.norm(2).item() ** 2 for g in grads),
            [g.abs().max() for g in grads],
            [g.mean() for g in grads],
            [bool(g.isfinite().all()) for g in grads],
            [bool(torch.isnan(g).any()) for g in grads],
        ]

    assert_same(norms)


def test_penalties_of_weights_have_their_value_and_their_gradient() -> None:
    def penalised(model: Any, x: torch.Tensor) -> Any:
        l2 = sum((p**2).sum() for p in model.parameters())
        l1 = sum(p.abs().sum() for p in model.parameters())
        lasso = sum(p.norm() for n, p in model.named_parameters() if n.endswith("weight"))
        loss = model(x).square().sum() + 0.1 * l2 + 0.01 * l1 + 0.1 * lasso
        loss.backward()
        return loss

    assert_same(penalised)


def test_sharpness_aware_steps_written_by_hand_are_the_same() -> None:
    def step(model: Any, x: torch.Tensor) -> Any:
        base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            backward(model, x)
            with torch.no_grad():
                norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]))
                moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            model.zero_grad()
            backward(model, x)
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            base.step()
            base.zero_grad()

    assert_same(step)


def test_gradients_of_two_losses_can_be_kept_and_combined() -> None:
    def combine(model: Any, x: torch.Tensor) -> Any:
        kept = []
        for scale in (1.0, -0.5):
            model.zero_grad()
            (scale * model(x)).exp().mean().backward()
            kept.append([p.grad for p in model.parameters()])
        dots = [(a * b).sum() for a, b in zip(*kept, strict=True)]
        for p, a, b in zip(model.parameters(), *kept, strict=True):
            p.grad = a + b
        return dots, clip_grad_norm_(model.parameters(), 0.1)

    assert_same(combine)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda w: w.new_ones(1, 4) @ w, "matmul.* of 'head.weight'"),
        (lambda w: w.T, "T of 'head.weight' would be that of one rank's block"),
        (lambda w: w.flatten(), "flatten of 'head.weight'"),
        (lambda w: w[0], "__getitem__ of 'head.weight'"),
        (lambda w: nn.utils.parameters_to_vector([w]), "view of 'head.weight'"),
        (lambda w: torch.cat([w, w]), "cat of 'head.weight'"),
        (lambda w: nn.functional.linear(w.new_ones(1, 6), w), "linear of 'head.weight'"),
        (lambda w: nn.functional.mse_loss(w, w), "mse_loss of 'head.weight'"),
        (lambda w: torch.count_nonzero(w), "count_nonzero of 'head.weight'"),
        (lambda w: w.tolist(), "tolist of 'head.weight'"),
        (lambda w: w.detach().cpu().numpy(), "numpy of 'head.weight'"),
        (lambda w: torch.where(w > 0), "where of 'head.weight'"),
        (lambda w: w.__setitem__(0, 0.0), "an index of 'head.weight'"),
        (lambda w: setattr(w, "data", torch.ones(9, 9)), "is this rank's block, .* and not"),
        (lambda w: torch.linalg.svdvals(w), "linalg_svdvals of 'head.weight'"),
        (lambda w: w.norm(dim=1), "norm of 'head.weight'"),
        (lambda w: w.sum(0), "sum of 'head.weight'"),
        (lambda w: w.std(), "std of 'head.weight'"),
        (lambda w: torch.randn_like(w), "randn_like would draw the same random numbers"),
    ],
)
def test_what_is_wrong_on_a_block_is_refused(wrong: Any, sentence: str) -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            wrong(model.head.weight)

    assert_refused(use, sentence, under=SPLIT)


def test_weights_are_compared_and_masked_on_all_ranks() -> None:
    def use(model: Any, x: torch.Tensor) -> Any:
        w = model.head.weight
        kept = w.detach().clone()
        same = torch.equal(w, kept), torch.allclose(w, kept + 1e-3)
        with torch.no_grad():
            w[w < 0] = 0.0
        return [torch.tensor(each) for each in (*same, torch.equal(w, kept), (w < 0).any())]

    assert_same(use)


def test_comparing_a_block_with_a_whole_tensor_is_refused_on_all_ranks() -> None:
    original, x = net(), image()
    whole = original.head.weight.detach().clone()  # type: ignore[union-attr]
    plan = Plan.make(capture(original, x), 2, lambda layer: Config())  # all of it is on rank 0

    def work(comm: InProcess) -> bool:
        model: Any = parallelize(original, plan, comm=comm)
        with pytest.raises(ShardwiseError, match=r"equal of 'head\.weight'"):
            torch.equal(model.head.weight, whole)
        return bool(model(x).isfinite().all())  # ranks are still in step

    assert all(World(2).run(work))


@pytest.mark.parametrize("fill", ["kaiming_normal_", "xavier_uniform_", "orthogonal_", "normal_"])
def test_drawing_new_weights_after_wrapping_is_refused_where_they_are_split(fill: str) -> None:
    def draw(model: Any, x: torch.Tensor) -> Any:
        getattr(nn.init, fill)(model.head.weight)

    sentence = "would (draw the same random numbers for every|be that of one) rank's block"
    assert_refused(draw, sentence, under=["f=2"])


def test_constant_weights_and_drawn_ones_that_are_whole_are_the_same() -> None:
    def fill(model: Any, x: torch.Tensor) -> Any:
        nn.init.zeros_(model.second.bias), nn.init.constant_(model.head.weight, 0.25)
        return model(x)

    def draw(model: Any, x: torch.Tensor) -> Any:
        nn.init.kaiming_normal_(model.conv.weight)
        return model(x)

    assert_same(fill)
    assert_same(draw, under=["n=2", "h=2"])


def test_counting_the_parameters_of_one_rank_is_warned_of() -> None:
    def count(model: Any, x: torch.Tensor) -> Any:
        if hasattr(model, "plan"):
            with pytest.warns(UserWarning, match="counts this rank's block, of .* in all"):
                sum(p.numel() for p in model.parameters())
        return sum(p.numel() for p in getattr(model, "full_tensors", model.state_dict)().values())

    assert_same(count, under=SPLIT)


def test_a_copy_of_a_parallel_model_has_blocks_of_its_own() -> None:
    def copied(model: Any, x: torch.Tensor) -> Any:
        twin = copy.deepcopy(model)
        backward(twin, x)
        norm = clip_grad_norm_(twin.parameters(), 0.5)
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        return norm, twin(x), model(x), dict(twin.state_dict())

    assert_same(copied)


def test_the_type_changes_with_gradients_in_place() -> None:
    def narrow(model: Any, x: torch.Tensor) -> Any:
        backward(model, x)
        model.float()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        kinds = {p.grad.dtype for p in model.parameters()}
        model.double()
        return kinds, bool(norm > 0)

    def run(model: Any, x: torch.Tensor) -> Any:
        kinds, positive = narrow(model, x)
        model.zero_grad()
        return [str(kind) for kind in kinds], positive

    assert_same(run, under=SPLIT)
