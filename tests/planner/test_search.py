"""The exact search over one choice per node, against trying every assignment."""

from __future__ import annotations

import functools
import itertools
import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from shardwise.errors import PlanError
from shardwise.planner import search
from shardwise.planner.search import Problem, Solution, solve, total

Pairs = list[tuple[int, int]]


def chain(rng: np.random.Generator) -> Pairs:
    return [(i, i + 1) for i in range(int(rng.integers(1, 8)))]


def residual(rng: np.random.Generator) -> Pairs:
    """Three blocks of two nodes with a skip around each; the last skip is a parallel edge."""
    del rng
    return [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 2), (4, 5), (5, 4)]


def inception(rng: np.random.Generator) -> Pairs:
    """Branches of one to two nodes between a split and a concatenation."""
    edges, node = [], 2
    for length in rng.integers(1, 3, size=3).tolist():
        path = [0, *range(node, node + length), 1]
        edges += itertools.pairwise(path)
        node += length
    return edges


def densenet(rng: np.random.Generator) -> Pairs:
    """Every concatenation takes all earlier features: the complete graph is the hard core."""
    return list(itertools.combinations(range(int(rng.integers(3, 7))), 2))


def crossing(rng: np.random.Generator) -> Pairs:
    """Two skips that cross, so that no series or parallel step applies at the end."""
    del rng
    return [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (3, 0), (3, 4)]


def random_dag(rng: np.random.Generator) -> Pairs:
    """Some pairs of seven nodes, often not all connected, numbered in no useful order."""
    pairs = [pair for pair in itertools.combinations(range(7), 2) if rng.random() < 0.35]
    label = rng.permutation(7).tolist()
    return [(label[u], label[v]) for u, v in pairs]


FAMILIES = [chain, residual, inception, densenet, crossing, random_dag]
SEEDS = range(90)


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Costs that are real or tie often, positive or not, some of them infinite."""
    values = rng.normal(size=shape) if rng.random() < 0.5 else rng.integers(0, 3, shape) * 1.0
    return np.where(rng.random(shape) < rng.choice([0.0, 0.1, 0.3]), np.inf, values)


def instance(family: Callable[[np.random.Generator], Pairs], seed: int) -> Problem:
    """A random problem; half of them share arrays between nodes and edges of equal sizes."""
    rng = np.random.default_rng(seed)
    pairs = family(rng)
    num_nodes = 1 + max((max(pair) for pair in pairs), default=0)
    sizes = rng.integers(1, 5, num_nodes) if seed % 3 else np.full(num_nodes, 3)
    fresh = functools.partial(draw, rng)
    make = functools.cache(fresh) if rng.random() < 0.5 else fresh
    costs = [make((int(n),)) for n in sizes]
    return Problem(costs, [(u, v, make((int(sizes[u]), int(sizes[v])))) for u, v in pairs])


def least(costs: list[np.ndarray], edges: list[search.Edge]) -> float:
    """The least cost of all assignments, each of which is an entry of one table."""
    table = np.zeros([len(cost) for cost in costs])
    for node, cost in enumerate(costs):
        table += cost.reshape([-1 if i == node else 1 for i in range(len(costs))])
    for u, v, matrix in edges:
        aligned = matrix if u < v else matrix.T
        shape = [len(cost) if i in (u, v) else 1 for i, cost in enumerate(costs)]
        table += aligned.reshape(shape)
    return float(table.min())


def check(problem: Problem) -> None:
    """The solution costs what it says, and as little as any assignment does."""
    best = least(list(problem.costs), list(problem.edges))
    if best == math.inf:
        with pytest.raises(PlanError, match=r"finite cost|infinity"):
            solve(problem)
        return
    solution = solve(problem)
    assert solution.bound == solution.cost == total(problem, solution.choices)
    assert solution.cost == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_elimination_finds_the_least_cost(family: Callable) -> None:
    for seed in SEEDS:
        check(instance(family, seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_bounds_before_the_elimination_leave_the_least_cost(
    family: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SMALL", 0)
    for seed in SEEDS:
        check(instance(family, seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_one_entry_give_the_same_tables(
    family: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "BLOCK", 1)
    for seed in SEEDS[::4]:
        check(instance(family, seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_bounds_enclose_the_optimum_and_keep_it(family: Callable) -> None:
    for seed in SEEDS:
        problem = instance(family, seed)
        best = least(list(problem.costs), list(problem.edges))
        if best == math.inf:
            continue
        graph = search._Graph(problem)
        bounds = search._Bounds(graph)
        while bounds.sharpen():
            assert bounds.lower - 1e-9 <= best <= bounds.upper + 1e-9, seed
        assert least(graph.costs, graph.edges) == pytest.approx(best, rel=1e-12, abs=1e-12), seed


@pytest.mark.parametrize("family", FAMILIES)
def test_dominance_keeps_an_optimum(family: Callable) -> None:
    for seed in SEEDS:
        problem = instance(family, seed)
        best = least(list(problem.costs), list(problem.edges))
        if best == math.inf:
            continue
        graph = search._Graph(problem)
        while search._drop_dominated(graph):
            pass
        assert least(graph.costs, graph.edges) == pytest.approx(best, rel=1e-12, abs=1e-12), seed


def modules(num_modules: int, num_choices: int, seed: int) -> Problem:
    """Modules of four branches, conv, norm and relu each, with costs of a metric between choices.

    Choices are points; moving between two of them costs their distance.
    """
    rng = np.random.default_rng(seed)
    points = rng.random((num_choices, 3))
    move = np.linalg.norm(points[:, None] - points[None], axis=2)
    pairs, head, node = [], 0, 1
    for _ in range(num_modules):
        tail = node + 12
        for branch in range(4):
            first = node + 3 * branch
            pairs += [(head, first), (first, first + 1), (first + 1, first + 2), (first + 2, tail)]
        head, node = tail, tail + 1
    costs = [rng.random(num_choices) for _ in range(node)]
    return Problem(costs, [(u, v, move) for u, v in pairs])


def test_bounds_and_elimination_agree_on_a_large_network(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = modules(8, 60, seed=0)
    pruned = solve(problem)
    monkeypatch.setattr(search, "SMALL", 10**30)
    assert pruned.cost == pytest.approx(solve(problem).cost, rel=1e-12)


def test_a_lone_node_takes_its_cheapest_choice() -> None:
    assert solve(Problem([np.array([2.0, np.inf, 1.0])], [])) == Solution((2,), 1.0, 1.0)


def test_no_nodes_cost_nothing() -> None:
    assert solve(Problem([], [])) == Solution((), 0.0, 0.0)


def test_unconnected_parts_are_solved_each(monkeypatch: pytest.MonkeyPatch) -> None:
    unlike = np.array([[9.0, 0.0], [0.0, 9.0]])
    costs = [np.array([0.0, 1.0]), np.array([0.0, 2.0]), np.array([3.0]), np.array([1.0, 0.0])]
    problem = Problem(costs, [(0, 1, unlike)])
    for small in (0, 10**9):
        monkeypatch.setattr(search, "SMALL", small)
        assert solve(problem) == Solution((1, 0, 0, 1), 4.0, 4.0)


def test_parallel_and_opposite_edges_add_up() -> None:
    forth, back = np.array([[0.0, 4.0], [1.0, 9.0]]), np.array([[5.0, 0.0], [0.0, 9.0]])
    zeros = np.zeros(2)
    problem = Problem([zeros, zeros], [(0, 1, forth), (1, 0, back), (0, 1, forth)])
    assert solve(problem) == Solution((1, 0), 2.0, 2.0)


def test_costs_that_are_all_infinite_are_an_error_of_one_sentence() -> None:
    with pytest.raises(PlanError, match="no choice of node 1 has a finite cost"):
        solve(Problem([np.zeros(2), np.full(3, np.inf)], []))
    differ = np.where(np.eye(2) == 1, np.inf, 0.0)  # two colours do not suffice for a triangle
    with pytest.raises(PlanError, match="every assignment of choices costs infinity"):
        solve(Problem([np.zeros(2)] * 3, [(0, 1, differ), (1, 2, differ), (2, 0, differ)]))


@pytest.mark.parametrize(
    "costs, edges, message",
    [
        ([np.zeros(2), np.zeros(3)], [(0, 1, np.zeros((3, 2)))], r"\(3, 2\), its ends \(2, 3\)"),
        ([np.zeros(2)], [(0, 0, np.zeros((2, 2)))], "edge 0-0 does not join"),
        ([np.array([0.0, np.nan])], [], "nan"),
        ([np.zeros(0)], [], "empty"),
    ],
)
def test_malformed_problems_are_refused(costs: list, edges: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(costs, edges)


def clique(num_nodes: int, num_choices: int, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    pairs = itertools.combinations(range(num_nodes), 2)
    edges = [(u, v, rng.random((num_choices, num_choices))) for u, v in pairs]
    return Problem([rng.random(num_choices) for _ in range(num_nodes)], edges)


@pytest.mark.parametrize("seed", range(5))
def test_where_tables_do_not_fit_the_least_cost_is_enclosed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = clique(8, 6, seed)
    best = solve(problem)
    monkeypatch.setattr(search, "LIMIT", 2**8)
    found = solve(problem)
    assert found.bound < best.cost <= found.cost == total(problem, found.choices)
    assert found.bound > 0.5 * best.cost


def test_a_table_beyond_the_limit_is_an_error_where_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "LIMIT", 2**10)
    monkeypatch.setattr(search._Bounds, "offer", lambda *_: None)
    with pytest.raises(PlanError, match=r"tables of .* entries, more than 1\.0e\+03"):
        solve(clique(9, 8, seed=0))


def test_memory_is_that_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SMALL", 10**30)
    problem = clique(5, 20, seed=0)  # tables of 20⁴ entries, from sums of 20⁵: 25 MB
    tracemalloc.start()
    solve(problem)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6


def test_ties_that_no_bound_breaks_are_broken_before_the_tables_grow() -> None:
    """Thirty nodes, each joined to each, with three choices of the same cost: 3²⁹ entries."""
    same = np.zeros((3, 3))
    pairs = itertools.combinations(range(30), 2)
    assert solve(Problem([np.ones(3)] * 30, [(u, v, same) for u, v in pairs])).cost == 30.0
