"""A parallel model behaves as the nn.Module it was made from."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from exactness import assert_exact, seeded, seeded_input
from pool import shared_pool
from shardwise import Config, Plan, PlanError, ShardwiseError, capture, parallelize
from shardwise.comm import Communicator
from shardwise.geometry.box import Box
from shardwise.runtime.parallel import ParallelModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(y.mean((2, 3))))


def make(**degrees: int) -> tuple[nn.Module, ParallelModel, torch.Tensor]:
    """A plain model, its parallel twin and an input."""
    plain, x = seeded(Net()), seeded_input((6, 3, 8, 7))
    plan = Plan.uniform(capture(plain, x), Communicator().size, **degrees)
    return plain, parallelize(plain, plan), x


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def on_four(function: Any) -> list[Any]:
    return shared_pool(4).run(function)


def _modes() -> bool:
    plain, model, x = make(n=2, h=2)
    torch.manual_seed(0)
    first = plain(x)
    torch.manual_seed(0)
    same_training = close(model(x), first)
    plain.eval(), model.eval()
    same_eval = close(model(x), plain(x)) and close(model(x), model(x))
    plain.train(), model.train()
    plain.norm.eval(), model.norm.eval()  # a frozen norm
    torch.manual_seed(1)
    first = plain(x)
    torch.manual_seed(1)
    return same_training and same_eval and close(model(x), first)


def test_train_and_eval_mode_are_read_at_run_time_module_by_module() -> None:
    assert all(on_four(_modes))


def _batches() -> bool:
    plain, model, _ = make(n=4)
    plain.eval(), model.eval()
    sizes = (1, 2, 3, 7, 12)
    return all(close(model(x), plain(x)) for x in (seeded_input((n, 3, 8, 7)) for n in sizes))


def test_the_batch_size_is_free_and_may_be_smaller_than_n() -> None:
    assert all(on_four(_batches))


def _small_batch_training() -> bool:
    plain, model, _ = make(n=4)
    plain.drop.p = model.drop.p = 0.0
    x = seeded_input((2, 3, 8, 7))
    plain(x).sum().backward(), model(x).sum().backward()
    gradients = model.full_gradients()
    state, expected = model.state_dict(), plain.state_dict()
    return all(close(gradients[n], p.grad) for n, p in plain.named_parameters()) and all(
        close(state[n].double(), t.double()) for n, t in expected.items()
    )


def test_ranks_without_samples_keep_their_statistics_and_weights_in_step() -> None:
    assert all(on_four(_small_batch_training))


def _norms_without_weights(frozen: bool) -> bool:
    """Three samples on four ranks, through norms that have no weights, or none to train."""
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=frozen), nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=frozen), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip
    plain = seeded(net)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    x = seeded_input((3, 2, 6, 6))
    model = parallelize(plain, Plan.uniform(capture(plain, seeded_input((4, 2, 6, 6))), 4, n=4))
    for one in (plain, model):
        one(x).square().sum().backward()
    found = model.full_gradients()
    return all(close(found[n], p.grad) for n, p in plain.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("frozen", (False, True))
def test_norms_without_weights_to_train_do_not_leave_a_rank_without_samples(frozen: bool) -> None:
    assert all(shared_pool(4).run(_norms_without_weights, frozen))


def _state() -> tuple[list[str], bool, bool]:
    plain, model, x = make(c=2, f=2)
    state = model.state_dict()
    names = list(state)
    same = all(torch.equal(state[n], t) for n, t in plain.state_dict().items())
    other = seeded(Net(), seed=7)
    model.load_state_dict(other.state_dict())
    model.eval(), other.eval()
    return names, same, close(model(x), other(x))


def test_state_dicts_are_full_and_load_from_any_plan() -> None:
    for names, same, loaded in on_four(_state):
        assert names == list(Net().state_dict()) and same and loaded


def _file() -> bool:
    _, model, x = make(f=4)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain = Net().double()
    plain.load_state_dict(torch.load(buffer, weights_only=True))
    plain.eval(), model.eval()
    return close(model(x), plain(x))


def test_a_saved_state_loads_into_the_original_module() -> None:
    assert all(on_four(_file))


def _optimizers() -> float:
    worst = 0.0
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        plain, model, x = make(n=2, f=2)
        plain.drop.p = model.drop.p = 0.0
        options = {"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD else {}
        pairs = [(m, kind(m.parameters(), lr=0.01, **options)) for m in (plain, model)]
        for _ in range(3):
            for m, optimizer in pairs:
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
        state = model.state_dict()
        worst = max(
            worst, *(float((state[n] - p).abs().max()) for n, p in plain.state_dict().items())
        )
    return worst


def test_stock_optimizers_step_as_on_one_device() -> None:
    assert max(on_four(_optimizers)) < 1e-9


def _accumulation() -> bool:
    plain, model, x = make(n=4)
    plain.eval(), model.eval()
    for m in (plain, model):
        m(x).sum().backward()
        m(2 * x).square().sum().backward()  # adds to what is there
    gradients = model.full_gradients()
    norm = model.clip_grad_norm_(0.5)
    expected = {name: p.grad.clone() for name, p in plain.named_parameters()}
    plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    clipped = model.full_gradients()
    return (
        all(close(gradients[name], g) for name, g in expected.items())
        and close(norm, plain_norm)
        and all(close(clipped[name], p.grad) for name, p in plain.named_parameters())
    )


def test_gradients_accumulate_and_are_clipped_by_their_global_norm() -> None:
    assert all(on_four(_accumulation))


def _parts() -> bool:
    plain, model, x = make(n=2, h=2)
    plain.eval(), model.eval()
    part = x[model.input_box(6).slices_in(Box.whole((6, 3, 8, 7)))]
    y = model(part, batch=6)
    y.sum().backward(), plain(x).sum().backward()
    gradients = model.full_gradients()
    return close(y, plain(x)) and all(
        close(gradients[n], p.grad) for n, p in plain.named_parameters()
    )


def test_a_rank_may_be_given_only_its_own_part_of_the_batch() -> None:
    assert all(on_four(_parts))


def _local() -> bool:
    plain, x = seeded(nn.Conv2d(3, 4, 3, padding=1)), seeded_input((2, 3, 8, 7))
    plan = Plan.make(capture(plain, x), 4, lambda layer: Config(h=4))
    model = parallelize(plain, plan, output="local")
    y = model(x)
    y.square().sum().backward()  # every rank: the loss of its own rows
    expected = plain(x)
    expected.square().sum().backward()
    rank = Communicator().rank
    gradients = model.full_gradients()
    return close(y, expected[:, :, 2 * rank : 2 * rank + 2]) and all(
        close(gradients[n], p.grad) for n, p in plain.named_parameters()
    )


def test_output_local_keeps_the_output_split() -> None:
    assert all(on_four(_local))


def _from_rank_zero() -> bool:
    rank = Communicator().rank
    plain = seeded(Net(), seed=rank)
    x = seeded_input((4, 3, 8, 7))
    model = parallelize(plain, Plan.uniform(capture(plain, x), n=4))
    state = model.state_dict()
    return all(torch.equal(state[n], t) for n, t in seeded(Net(), seed=0).state_dict().items())


def test_all_ranks_start_from_the_weights_of_rank_zero() -> None:
    assert all(on_four(_from_rank_zero))


def _disagreement(what: str) -> str:
    rank = Communicator().rank
    plain, x = seeded(Net()), seeded_input((4, 3, 8, 7), seed=rank if what == "batch" else 0)
    graph = capture(plain, x)
    plan = Plan.uniform(graph, n=4) if what != "plan" or rank < 2 else Plan.uniform(graph, f=4)
    try:
        parallelize(plain, plan)(x)
    except ShardwiseError as error:
        return str(error)
    return ""


def test_ranks_with_different_batches_or_plans_are_all_told() -> None:
    for message in shared_pool(4).run(_disagreement, "batch"):
        assert message.startswith("rank 1 was given another batch than rank 0")
    for message in shared_pool(4).run(_disagreement, "plan"):
        assert message == "rank 2 was started with another plan than rank 0"
    assert not any(shared_pool(4).run(_disagreement, "nothing"))


def _half() -> torch.dtype:
    _, model, x = make(n=4)
    model.to(torch.float32).zero_grad()
    y = model(x.float())
    y.sum().backward()
    return y.dtype


def test_a_parallel_model_moves_to_another_dtype() -> None:
    assert set(on_four(_half)) == {torch.float32}


def test_one_worker_needs_no_process_group_and_leaves_the_model_alone() -> None:
    plain, x = seeded(Net()), seeded_input((4, 3, 8, 7))
    before = copy.deepcopy(plain.state_dict())
    model = parallelize(plain, Plan.uniform(capture(plain, x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    assert all(torch.equal(before[n], t) for n, t in plain.state_dict().items())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_a_second_backward_through_one_forward_is_refused() -> None:
    plain, x = seeded(Net()), seeded_input((4, 3, 8, 7))
    y = parallelize(plain, Plan.uniform(capture(plain, x)))(x).sum()
    y.backward()
    with pytest.raises(ValueError, match=r"second time: .*retain_graph=True"):
        y.backward()


def test_wrong_input_and_wrong_world_are_named() -> None:
    plain, x = seeded(Net()), seeded_input((4, 3, 8, 7))
    graph = capture(plain, x)
    with pytest.raises(PlanError, match="for 4 workers, but 1 are running"):
        parallelize(plain, Plan.uniform(graph, n=4))
    model = parallelize(plain, Plan.uniform(graph))
    with pytest.raises(ShardwiseError, match="cannot be captured for input 4x2x8x7"):
        model(seeded_input((4, 2, 8, 7)))
    with pytest.raises(ShardwiseError, match="takes 1 input tensors, and got 2"):
        model(x, x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(6, n) for n in (6, 6, 3))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


def test_tied_parameters_train_as_one_and_keep_all_their_names() -> None:
    model, x = seeded(Tied()), seeded_input((4, 6))
    graph = capture(model, x)
    assert_exact(model, x, [Plan.random(graph, 4, seed) for seed in range(4)], graph, 3)
