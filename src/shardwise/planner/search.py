"""The cheapest choice per node of a graph whose cost is a sum over nodes and edges (P4).

P4 eliminates nodes and edges until nothing is left, at choices³ per node: 0.6 s for Inception-v3
with 40,176 choices in all. So bounds come first, at choices² per edge: messages swept over the
graph (sequential tree-reweighted message passing, Kolmogorov 2006) bound from below what any
assignment with a given choice costs, and choices that cannot beat the best assignment found so far
are dropped: nine of ten in that example, and all is done after 0.07 s. Whatever remains is
eliminated exactly, in an order that keeps tables small. Where even these do not fit, the best
assignment found is the answer, with the bound that says how far it can be from the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np

from shardwise.errors import PlanError

LIMIT = 2**28  # entries of all the tables an elimination may keep: 2 GiB
BLOCK = 2**16  # entries summed at a time: 512 KiB stay in the cache
SMALL = 2**18  # additions that are done sooner than a sweep prepares to avoid them
FEW = (16, 8, 4, 2)  # choices per node to look for a good assignment among: the first affordable
MARGIN = 1e-9  # a bound must exceed the best cost by this share before a choice is dropped
STALL = 1e-4  # sweeps that close less than this share of the gap have converged

Edge = tuple[int, int, np.ndarray]  # (u, v, float64 [choices of u, choices of v])
Factor = tuple[tuple[int, ...], np.ndarray]  # nodes in the order of elimination, one axis each


@dataclass(frozen=True, eq=False)
class Problem:
    """A vector of costs per node and a matrix of costs per edge; infinity forbids.

    >>> solve(Problem([np.array([0.0, 1.0]), np.array([5.0, 0.0])], [(0, 1, 9 * (1 - np.eye(2)))]))
    Solution(choices=(1, 1), cost=1.0, bound=1.0)
    """

    costs: Sequence[np.ndarray]  # float64 [choices] per node
    edges: Sequence[Edge]  # any direction, parallel ones add up

    def __post_init__(self) -> None:
        for u, v, matrix in self.edges:
            if u == v or min(u, v) < 0:
                raise ValueError(f"edge {u}-{v} does not join two nodes")
            if matrix.shape != (expected := (len(self.costs[u]), len(self.costs[v]))):
                raise ValueError(f"edge {u}-{v} has shape {matrix.shape}, its ends {expected}")
        arrays = {id(a): a for a in chain(self.costs, (m for _, _, m in self.edges))}
        if not all(a.size and a.min() > -math.inf for a in arrays.values()):
            raise ValueError("an array of costs is empty, or holds nan or minus infinity")


@dataclass(frozen=True)
class Solution:
    """The index of the choice of every node, what they cost together, and the least that any do."""

    choices: tuple[int, ...]
    cost: float
    bound: float  # no assignment costs less; the cost itself, but where tables did not fit


def total(problem: Problem, choices: Sequence[int]) -> float:
    """The cost of the given choices."""
    return math.fsum(_terms(problem, choices))


def _terms(problem: Problem | _Graph, choices: Sequence[int]) -> list[float]:
    nodes = [float(cost[c]) for cost, c in zip(problem.costs, choices, strict=True)]
    return nodes + [float(matrix[choices[u], choices[v]]) for u, v, matrix in problem.edges]


def solve(problem: Problem) -> Solution:
    """Choices of the least total cost, or where their tables do not fit, the best ones found."""
    graph = _Graph(problem)
    bounds = _Bounds(graph)
    order = _prune(graph, bounds)
    if order is None:
        least = min(bounds.lower, bounds.upper) - bounds.margin
        return Solution(bounds.best, total(problem, bounds.best), least)
    choices = graph.named(_eliminate(graph.costs, graph.edges, order))
    cost = total(problem, choices)
    if cost == math.inf:
        raise PlanError("every assignment of choices costs infinity: allow more of them")
    return Solution(choices, cost, cost)


class _Graph:
    """The choices still alive, and the costs and messages restricted to them.

    Edges lead from a lower to a higher node, one per pair. `messages[0][e]` is what the lower end
    tells the choices of the higher one, `messages[1][e]` the reverse.
    """

    def __init__(self, problem: Problem) -> None:
        self.costs = list(problem.costs)
        self.alive = [np.arange(len(cost)) for cost in self.costs]
        parallel: dict[tuple[int, int], list[np.ndarray]] = {}
        for u, v, matrix in problem.edges:
            parallel.setdefault((min(u, v), max(u, v)), []).append(matrix if u < v else matrix.T)
        self.ends = list(parallel)
        self.matrices = [sum(same[1:], start=same[0]) for same in parallel.values()]
        self.above: list[list[int]] = [[] for _ in self.costs]  # edges to higher nodes
        self.below: list[list[int]] = [[] for _ in self.costs]
        for e, (u, v) in enumerate(self.ends):
            self.above[u].append(e)
            self.below[v].append(e)
        self.messages = [[np.zeros(len(self.costs[e[i]])) for e in self.ends] for i in (1, 0)]
        distinct = {id(matrix): matrix for matrix in self.matrices}
        holed = {key for key, matrix in distinct.items() if matrix.max() == math.inf}
        self.holed = [e for e, matrix in enumerate(self.matrices) if id(matrix) in holed]
        for node, cost in enumerate(self.costs):
            self.keep(node, cost < math.inf)
        self.drop_forbidden()

    def keep(self, node: int, mask: np.ndarray) -> bool:
        """Drop the other choices of a node; whether there were any."""
        if mask.all():
            return False
        if not mask.any():
            raise PlanError(f"no choice of node {node} has a finite cost: allow more of them")
        index = np.flatnonzero(mask)
        self.alive[node] = self.alive[node][index]
        self.costs[node] = self.costs[node][index]
        for e in self.above[node]:
            self.matrices[e] = self.matrices[e][index]
            self.messages[1][e] = self.messages[1][e][index]
        for e in self.below[node]:
            self.matrices[e] = self.matrices[e][:, index]
            self.messages[0][e] = self.messages[0][e][index]
        return True

    def drop_forbidden(self) -> None:
        """Leave every choice a finite pair on every edge, so that all messages are finite."""
        shrunk = bool(self.holed)
        while shrunk:
            shrunk = False
            for e in self.holed:
                u, v = self.ends[e]
                shrunk |= self.keep(u, self.matrices[e].min(axis=1) < math.inf)
                shrunk |= self.keep(v, self.matrices[e].min(axis=0) < math.inf)

    def named(self, picks: Sequence[int]) -> tuple[int, ...]:
        """Places among the choices alive, as places among all."""
        return tuple(int(alive[p]) for alive, p in zip(self.alive, picks, strict=True))

    @property
    def edges(self) -> list[Edge]:
        return [(u, v, matrix) for (u, v), matrix in zip(self.ends, self.matrices, strict=True)]


def _prune(graph: _Graph, bounds: _Bounds) -> list[int] | None:
    """Drop choices while that is less work than to eliminate them; the order of elimination.

    Sweeps go on until they have cost as much as the elimination would now, so the two together
    cost at most about twice the better mix of them. None: the tables do not fit, and some
    assignment is known.
    """
    spent, converged = 0, False
    while True:
        order, entries, work = _order([len(cost) for cost in graph.costs], graph.ends)
        if entries <= LIMIT and (converged or work <= max(spent, SMALL)):
            return order
        if converged and not _drop_dominated(graph):
            if bounds.best:
                return None
            raise PlanError(
                f"the exact search needs tables of {entries:.1e} entries, more than {LIMIT:.1e}: "
                "allow fewer choices per node, or connect fewer nodes"
            )
        spent += 4 * sum(matrix.size for matrix in graph.matrices)
        converged = not bounds.sharpen()


class _Bounds:
    """A cost some assignment reaches, which that is, and a cost that none undercuts."""

    def __init__(self, graph: _Graph) -> None:
        self.graph, self.upper, self.lower, self.margin = graph, math.inf, -math.inf, 0.0
        self.best: tuple[int, ...] = ()

    def sharpen(self) -> bool:
        """Sweep up and down, dropping what cannot be optimal; whether more of that may help."""
        upper, lower = self.upper, self.lower
        self.lower = max(self.lower, _sweep(self.graph, upward=True)[0])
        bound, slacks, picks = _sweep(self.graph, upward=False)
        self.offer(picks)
        if self.upper - bound > self.margin:
            self.offer(_best_of_few(self.graph, slacks, picks))
        # The slacks hold on top of the bound from before their own sweep.
        room = self.upper - self.lower + self.margin
        shrunk = any([self.graph.keep(node, s <= room) for node, s in enumerate(slacks)])
        self.graph.drop_forbidden()
        self.lower = max(self.lower, bound)
        if lower == -math.inf or upper == math.inf:
            return self.upper < math.inf
        gained = self.lower - lower + upper - self.upper
        return shrunk or gained > STALL * (upper - lower) + self.margin

    def offer(self, picks: Sequence[int]) -> None:
        """Keep the cost of an assignment if it is the lowest so far."""
        terms = _terms(self.graph, picks)
        if math.fsum(terms) < self.upper:
            self.upper, self.margin = math.fsum(terms), MARGIN * math.fsum(map(abs, terms))
            self.best = self.graph.named(picks)


def _best_of_few(graph: _Graph, slacks: list[np.ndarray], picks: list[int]) -> list[int]:
    """The best assignment of each node's pick and of the choices with the least slack."""
    budget = sum(matrix.size for matrix in graph.matrices)
    for few in FEW:
        sizes = [min(few, len(slack)) for slack in slacks]
        order, _, work = _order(sizes, graph.ends)
        if work <= budget:
            break
    else:
        return picks
    for slack, pick in zip(slacks, picks, strict=True):
        slack[pick] = -1.0  # always among the few
    index = [np.argsort(slack)[:few] for slack in slacks]
    costs = [cost[i] for cost, i in zip(graph.costs, index, strict=True)]
    edges = [(u, v, matrix[index[u][:, None], index[v]]) for u, v, matrix in graph.edges]
    best = _eliminate(costs, edges, order)
    return [int(i[b]) for i, b in zip(index, best, strict=True)]


def _sweep(graph: _Graph, upward: bool) -> tuple[float, list[np.ndarray], list[int]]:
    """Renew the messages in one direction; a lower bound, slacks of all choices, an assignment.

    The graph is a sum of chains that only go up, one edge being part of one chain; a node is part
    of as many as it has edges on its busier side, and belongs to them in equal shares. Messages
    move costs along a chain such that the cheapest rest of it costs nothing for any choice of the
    node at hand. What remains at the node is thus the least that its chains cost, choice by choice.
    """
    to, back = graph.messages if upward else graph.messages[::-1]
    matrices = graph.matrices if upward else [matrix.T for matrix in graph.matrices]
    behind, ahead = (graph.below, graph.above) if upward else (graph.above, graph.below)
    num_nodes, source = len(graph.costs), 0 if upward else 1
    bound, slacks, picks = 0.0, [np.empty(0)] * num_nodes, [0] * num_nodes
    for node in range(num_nodes) if upward else reversed(range(num_nodes)):
        rest = sum((back[e] for e in ahead[node]), start=graph.costs[node])
        known = sum((matrices[e][picks[graph.ends[e][source]]] for e in behind[node]), start=rest)
        picks[node] = int(known.argmin())
        least = sum((to[e] for e in behind[node]), start=rest)
        minimum = least.min()
        slacks[node] = least - minimum
        num_chains = max(len(behind[node]), len(ahead[node]), 1)
        # Chains that end here bring in their bound; those that go on pass it with the messages.
        bound += float(minimum) * (num_chains - len(ahead[node])) / num_chains
        share = least / num_chains
        for e in ahead[node]:
            to[e] = (matrices[e] + (share - back[e])[:, None]).min(axis=0)
    return bound, slacks, picks


def _drop_dominated(graph: _Graph) -> bool:
    """Drop choices that another one replaces at no cost, whatever the other nodes choose.

    Unlike bounds this breaks exact ties, but it takes choices³ per edge.
    """
    shrunk = False
    for node, cost in enumerate(graph.costs):
        matrices = [graph.matrices[e] for e in graph.above[node]]
        matrices += [graph.matrices[e].T for e in graph.below[node]]
        glance = [matrix[:, ::16] for matrix in matrices]  # enough to rule out most
        keep = np.ones(len(cost), dtype=bool)
        for a in range(len(cost)):
            keep[a] = False  # one of two equal choices stays: the one to compare with is kept
            tests = ((_savings(cost, some, a)[keep] >= 0).any() for some in (glance, matrices))
            keep[a] = not all(tests)
        shrunk |= graph.keep(node, keep)
        graph.drop_forbidden()
    return shrunk


def _savings(cost: np.ndarray, matrices: Sequence[np.ndarray], a: int) -> np.ndarray:
    """What each choice saves at least in place of choice a; nan counts as unknown."""
    with np.errstate(invalid="ignore"):
        # A pair that is forbidden already, inf - inf, gives nan: fmin passes it over.
        edges = [np.fmin.reduce(matrix[a] - matrix, axis=1) for matrix in matrices]
        return sum(edges, start=np.asarray(cost[a] - cost))


def _order(sizes: Sequence[int], ends: Sequence[tuple[int, int]]) -> tuple[list[int], int, int]:
    """The nodes, next the one with the smallest table; entries of all tables, additions in all.

    Leaves, chains and parallel branches fall out first, as in P4's node and edge eliminations.
    """
    near: list[set[int]] = [set() for _ in sizes]
    for u, v in ends:
        if sizes[u] > 1 and sizes[v] > 1:
            near[u].add(v)
            near[v].add(u)
    table = [math.prod(sizes[v] for v in others) for others in near]
    heap = [(entries, node) for node, entries in enumerate(table)]
    heapify(heap)
    order: list[int] = []
    entries = work = 0
    while heap:
        size, node = heappop(heap)
        if size != table[node]:
            continue  # outdated
        table[node] = -1
        order.append(node)
        entries, work = entries + size, work + size * sizes[node]
        for v in near[node]:
            near[v] |= near[node]
            near[v] -= {v, node}
            table[v] = math.prod(sizes[w] for w in near[v])
            heappush(heap, (table[v], v))
    return order, entries, work


def _eliminate(costs: list[np.ndarray], edges: list[Edge], order: list[int]) -> list[int]:
    """The best choice of every node: minimise node after node away, then read them off backwards.

    A node's factors become one table over its neighbours: P4's node elimination where there are
    two of them. Factors stay separate until then, so P4's edge elimination is part of that sum.
    """
    place = {node: i for i, node in enumerate(order)}
    factors: list[list[Factor]] = [[((node,), cost)] for node, cost in enumerate(costs)]
    for u, v, matrix in edges:
        if len(matrix) == 1:
            factors[v].append(((v,), matrix[0]))
        elif len(matrix.T) == 1:
            factors[u].append(((u,), matrix[:, 0]))
        elif place[u] < place[v]:
            factors[u].append(((u, v), matrix))
        else:
            factors[v].append(((v, u), matrix.T))
    for node in order:
        scope = sorted({v for vs, _ in factors[node] for v in vs[1:]}, key=place.__getitem__)
        if scope:
            factors[scope[0]].append((tuple(scope), _minimum(factors[node], scope, costs)))
    picks = [0] * len(order)
    for node in reversed(order):
        rows = (t[(slice(None), *(picks[v] for v in vs[1:]))] for vs, t in factors[node])
        picks[node] = int(sum(rows, start=np.zeros(1)).argmin())
    return picks


def _minimum(factors: list[Factor], scope: list[int], costs: list[np.ndarray]) -> np.ndarray:
    """The sum of factors, minimised over their first node; a table over the scope."""
    out = np.empty([len(costs[v]) for v in scope])
    shapes = ([len(costs[v]) if v in nodes else 1 for v in scope] for nodes, _ in factors)
    parts = [t.reshape(len(t), *shape) for (_, t), shape in zip(factors, shapes, strict=True)]
    _fill(out, sorted(parts, key=lambda part: part.size))
    return out


def _fill(out: np.ndarray, parts: list[np.ndarray]) -> None:
    """Write the minimum over the parts' first axis, in blocks that fit in the cache."""
    if out.size * len(parts[0]) <= BLOCK or out.size == 1:
        sum(parts[1:], start=parts[0]).min(axis=0, out=out)
        return
    axis = next(i for i, size in enumerate(out.shape) if size > 1)
    half = out.shape[axis] // 2
    for piece in (slice(None, half), slice(half, None)):
        cut = (slice(None),) * axis + (piece,)
        _fill(out[cut], [p if p.shape[axis + 1] == 1 else p[(slice(None), *cut)] for p in parts])
