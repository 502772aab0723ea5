"""P3 (PCNN): speed-ups on 128 nodes, plain data parallelism, and the sweeps over k and f."""

from __future__ import annotations

from dataclasses import replace

from shardwise import Engine, LayerGraph, Plan, simulate
from shardwise.planner.layer_costs import Training

from .figures import Paper, Result
from .machines import alone, cluster, network

TRAINING = Training(states=0, output="local", whole_classes=False)
CLUSTER = "cori-haswell"
BEST = (9, 2)  # k and f of the paper
KS, FS = (3, 6, 9, 12), (0, 1, 2, 3)


def run(quick: bool = False) -> Result:
    paper = Paper.load("p3")
    weights = {int(k): int(n) for k, n in paper.inputs["layers_with_weights"].items()}
    nodes = int(paper.inputs["nodes"])
    sweep = Sweep(network("vgg11", 256), nodes, weights)
    ours = {"n256": sweep.speedup(*BEST), "dp": sweep.plain()} | sweep.choices()
    if not quick:
        ours["n512"] = Sweep(network("vgg11", 512), nodes, weights).speedup(*BEST)
        few = [Sweep(network("vgg11", 128), 1 << i, weights).speedup(*BEST) for i in range(8)]
        ours["n128"] = max(few)
        for name in ("vgg128", "vgg256", "vgg512"):
            ours[name] = Sweep(network(name, 256), nodes, weights).speedup(*BEST)
    return paper.compare(ours)


class Sweep:
    """Speed-ups of one network and batch on so many nodes."""

    def __init__(self, graph: LayerGraph, nodes: int, weights: dict[int, int]) -> None:
        self.graph, self.weights = graph, weights
        self.machines = cluster(CLUSTER).with_workers(nodes)
        self.one = alone(graph, self.machines, TRAINING).seconds
        self.samples = Plan.uniform(graph, n=nodes)
        self.linear = [layer.name for layer in graph.layers if layer.op == "linear"]

    def speedup(self, k: int, f: int) -> float:
        """Two chunks, k of 16 layers in the first; gathered gradients of f linear layers."""
        gathered = set(self.linear[:f]) if self.machines.world > 1 else set()
        layers = {
            name: replace(config, gradient="gather") if name in gathered else config
            for name, config in self.samples.layers.items()
        }
        return self._speedup(
            replace(self.samples, layers=layers), Engine("chunks", last=self.weights[k])
        )

    def plain(self) -> float:
        """All gradients are summed when the backward pass is over."""
        return self._speedup(self.samples, Engine("end"))

    def _speedup(self, plan: Plan, engine: Engine) -> float:
        trace = simulate(plan, self.graph, self.machines, training=TRAINING, gradients=engine)
        return self.one / trace.seconds

    def choices(self) -> dict[str, float]:
        """The best k and f, and what the paper says of the others."""
        k, f = BEST
        by_k = {k: self.speedup(k, f) for k in KS}
        by_f = {f: self.speedup(k, f) for f in FS}
        return {
            "k-best": float(max(by_k, key=lambda k: by_k[k])),
            "f-best": float(max(by_f, key=lambda f: by_f[f])),
            "f-0": float(by_f[0] < max(by_f.values())),
            "f-3": float(by_f[3] < by_f[2]),
        }
