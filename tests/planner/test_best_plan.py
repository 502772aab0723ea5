"""Planned costs against every known plan, brute force and P4's numbers; caps and explanations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from math import isclose
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import Config, Engine, LayerGraph, Plan, PlanError, capture, zoo
from shardwise.cli.tables import explain_table
from shardwise.cluster.cluster import Cluster, presets
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.best_plan import Planner, baselines, complete, predict, size, wanted
from shardwise.planner.candidates import Candidates
from shardwise.planner.costs import Costs, usual
from shardwise.planner.layer_costs import Training
from shardwise.planner.planned import Alternative, examine, plan
from shardwise.planner.search import total
from shardwise.specs.model_spec import load_model

TABLE_2 = Path(__file__).parents[2] / "examples" / "p4_table2.py"
ROUNDING = 1 + 1e-9


@cache
def graph_of(name: str, batch: int, *space: int) -> LayerGraph:
    """A network of the zoo at a small input size; its weights are never made."""
    shape = zoo.input_shape(name, batch)
    with torch.device("meta"):
        return capture(zoo.build(name), torch.empty((*shape[:2], *(space or shape[2:]))))


@cache
def costs_of(cluster: str, workers: int | None, name: str, batch: int, *space: int) -> Costs:
    machines = Cluster.load(cluster)
    return Costs(graph_of(name, batch, *space), machines.with_workers(workers or machines.world))


def small(cluster: str) -> Costs:
    """AlexNet for small images on the first workers of a cluster, at most 16."""
    world = Cluster.load(cluster).world
    return costs_of(cluster, 4 if world == 1 else min(world, 16), "alexnet", 64, 64, 64)


@pytest.fixture(scope="module")
def table_2() -> Plan:
    """P4's Table 2, planned."""
    with torch.device("meta"):
        graph = capture(load_model(f"{TABLE_2}:build"), torch.empty(512, 3, 64, 64))
    return plan(graph, cluster="k80x16")


# -- optimality ------------------------------------------------------------------------------------


def assert_best(costs: Costs) -> None:
    best = predict(Planner(costs).best(), costs)
    for name, (_, other) in baselines(costs).items():
        assert best.seconds <= other.seconds * ROUNDING, name


@pytest.mark.parametrize("cluster", [*presets(), "8@1Gb", "6@1Gb", "2x4@1Gb/4:1"])
def test_alexnet_is_planned_at_no_more_than_any_baseline_costs(cluster: str) -> None:
    assert_best(small(cluster))


@pytest.mark.parametrize(
    ("cluster", "name", "batch", "space"),
    [
        ("4x10Gb", "digits", 32, ()),
        ("k80x16", "digits", 32, ()),
        ("2x4@1Gb/4:1", "vgg11", 32, (32, 32)),
        ("4x10Gb", "resnet34_cifar", 16, (16, 16)),
        ("2x4@1Gb/4:1", "unet3d", 2, (16, 16, 16)),
    ],
)
def test_other_networks_are_planned_at_no_more_than_any_baseline_costs(
    cluster: str, name: str, batch: int, space: tuple[int, ...]
) -> None:
    assert_best(costs_of(cluster, None, name, batch, *space))


@pytest.mark.deep
@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("cluster", presets())
def test_every_network_on_every_preset_is_planned_at_no_more_than_any_baseline_costs(
    name: str, cluster: str
) -> None:
    world = Cluster.load(cluster).world
    costs = costs_of.__wrapped__(cluster, 4 if world == 1 else min(world, 16), name, 64)
    assert_best(costs)


@pytest.mark.parametrize("hidden", [0.0, 0.5])
@pytest.mark.parametrize("cluster", ["local", "k80x16", "p100-4x4", "taihulight"])
def test_the_prediction_of_the_best_plan_is_what_the_search_minimised(
    cluster: str, hidden: float
) -> None:
    costs = small(cluster)
    planner = Planner(costs)
    best = planner.best(hidden)
    choices = [
        costs.of(layer).places[usual(layer, best.layers[layer.name])] for layer in planner.layers
    ]
    predicted = predict(best, costs)
    expected = predicted.seconds - hidden * predicted.update
    assert total(planner.problem(hidden), choices) == pytest.approx(expected)


@pytest.mark.parametrize("rate", ["1kB", "100kB", "10MB", "1GB", "100GB"])
@pytest.mark.parametrize("output", ["full", "local"])
def test_no_assignment_of_candidates_costs_less(rate: str, output: str) -> None:
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20))
    graph = capture(net, torch.zeros(6, 40))
    costs = Costs(graph, Cluster.load(f"2@{rate}/s"), training=Training(output=output))
    planner = Planner(costs)
    names = [layer.name for layer in planner.layers]
    tried = itertools.product(*(costs.of(layer).configs for layer in planner.layers))
    plans = [complete(graph, 2, dict(zip(names, configs, strict=True))) for configs in tried]
    assert len(plans) == 5 * 3 * 5
    every = [predict(plan, costs).seconds for plan in plans if wanted(plan, costs)]
    assert predict(planner.best(), costs).seconds == pytest.approx(min(every))


# -- P4's numbers ----------------------------------------------------------------------------------


def alternative(found: list[Alternative], config: Config) -> Alternative:
    return next(a for a in found if a.config == config)


@pytest.mark.parametrize(
    ("config", "transfer", "compute", "update"),
    [
        (Config(n=16), 0.0, 1.28, 1075.0),
        (Config(f=16), 134.4, 1.28, 0.0),
        (Config(f=4), 33.6, 5.1, 0.0),
        (Config(f=2), 16.8, 10.2, 0.0),
        (Config(), 8.4, 20.4, 0.0),
    ],
    ids=str,
)
def test_a_linear_layer_costs_what_p4_measured(
    table_2: Plan, config: Config, transfer: float, compute: float, update: float
) -> None:
    found = alternative(table_2.explain("fc"), config)
    milliseconds = (1e3 * found.transfer, 1e3 * found.compute, 1e3 * found.update)
    assert milliseconds == pytest.approx((transfer, compute, update), rel=0.01)


def test_the_linear_layer_is_given_to_two_workers_as_in_p4(table_2: Plan) -> None:
    assert table_2.layers["fc"] == Config(f=2)
    assert str(table_2.layers["conv1"]) == "n=16"
    planned = Planner(table_2.findings.costs).best()
    assert planned.layers["fc"] == Config(f=2)


def test_alexnet_moves_23_times_less_than_sample_parallelism() -> None:
    costs = costs_of("k80x16", 16, "alexnet", 512)
    best = predict(Planner(costs).best(), costs)
    samples = baselines(costs)["sample (DDP)"]
    assert str(samples[0].layers["features.0"]) == "n=16"
    assert samples[1].moved >= 23 * best.moved > 0
    assert best.seconds < samples[1].seconds


# -- gathered gradients ----------------------------------------------------------------------------


def test_linear_layers_may_gather_their_gradients_and_others_may_not() -> None:
    graph = graph_of("alexnet", 64, 64, 64)
    candidates = Candidates.of(graph, 4)
    for layer in graph.layers:
        found = [c for c in candidates.configs(layer, graph.batch) if c.gradient == "gather"]
        assert bool(found) == (layer.op == "linear"), layer.name
        assert all(config.n == config.num_workers > 1 for config in found)


def test_gathering_moves_activations_and_errors_instead_of_weights() -> None:
    # P3: the first linear layer of VGG-A at 256 samples.
    with torch.device("meta"):
        graph = capture(nn.Linear(25088, 4096), torch.empty(256, 25088))
    (layer,) = (layer for layer in graph.layers if layer.op == "linear")
    costs = Costs(graph, Cluster.load("4x10Gb"))
    found = costs.under(layer, (Config(n=4), Config(n=4, gradient="gather")))
    weights, gathered = (25088 + 1) * 4096 * 4, (25088 + 4096) * 256 * 4
    # A sum sends all but the own part to be added and then back; a gather sends it to the others.
    assert found.moved.tolist() == [2 * 3 * weights, 3 * gathered]
    assert weights / gathered == pytest.approx(392 / 28.5, rel=0.01)
    assert found.update[1] < found.update[0] / 10
    assert found.backward[1] > found.backward[0]  # every rank computes the whole gradient


# -- memory ----------------------------------------------------------------------------------------


def test_a_unet_fits_into_less_than_sample_parallelism_needs() -> None:
    costs = costs_of("local", 4, "unet3d", 2, 32, 32, 32)
    samples = predict(Plan.uniform(costs.graph, 4, n=2), costs).memory
    cap = samples * 6 // 10
    capped = plan(costs.graph, cluster="local", workers=4, memory=cap)
    assert capped.findings.prediction.memory <= cap
    assert predict(capped, costs).memory == capped.findings.prediction.memory


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_a_cap_that_binds_is_kept_and_costs_time(share: float) -> None:
    costs = small("p100-4x4")
    planner = Planner(costs)
    unlimited = predict(planner.best(), costs)
    cap = round(share * unlimited.memory)
    found, prediction = planner.under(cap)
    assert prediction.memory <= cap and prediction == predict(found, costs)
    assert prediction.seconds >= unlimited.seconds / ROUNDING


@pytest.mark.parametrize("mode", ["end", "layer"])
def test_the_plan_that_is_given_out_keeps_the_cap(mode: str) -> None:
    """Whichever of the plans that hide updates is simulated as the fastest."""
    costs = costs_of("2@10Gb", 2, "unet3d", 2, 32, 32, 32)
    planner = Planner(costs)
    needed = sorted({predict(planner.best(h), costs).memory for h in (0.0, 0.5, 1.0)})
    assert len(needed) > 1
    for cap in (needed[0], (needed[0] + needed[1]) // 2, needed[-1]):
        found = examine(costs, Engine(mode), cap=cap)
        assert found.findings.prediction.memory <= cap


def test_a_model_that_does_not_fit_is_told_how_many_workers_it_needs() -> None:
    graph = capture(nn.Sequential(nn.Linear(64, 64)), torch.zeros(4, 64))
    with pytest.raises(PlanError) as error:
        plan(graph, cluster="local", workers=2, memory="4KiB")
    sentence = str(error.value)
    assert sentence.startswith("the model does not fit: a worker may use 4 KiB, and the least that")
    assert "any plan for 2 workers needs is 31.2 KiB" in sentence
    workers = int(sentence.split("it would fit on ")[1].split()[0])
    fits = plan(graph, cluster="local", workers=workers, memory="4KiB")
    assert fits.findings.prediction.memory <= 4 << 10
    with pytest.raises(PlanError, match="does not fit"):
        plan(graph, cluster="local", workers=workers // 2, memory="4KiB")


@pytest.mark.parametrize("cluster", ["local", "2x10Gb"])  # as many workers as one likes, or two
def test_a_model_that_never_fits_is_told_so(cluster: str) -> None:
    graph = capture(nn.Sequential(nn.Linear(64, 64)), torch.zeros(4, 64))
    with pytest.raises(PlanError, match=r"31\.2 KiB; more workers do not help$"):
        plan(graph, cluster=cluster, workers=2, memory=100)


@pytest.mark.parametrize(
    ("name", "batch", "cluster"),
    [("digits", 32, "4x10Gb"), ("digits", 32, "8@1Gb"), ("unet3d", 2, "4x10Gb")],
)
def test_no_known_plan_needs_less_than_the_least_memory(
    name: str, batch: int, cluster: str
) -> None:
    """What is called the least that any plan needs decides whether a model fits."""
    costs = costs_of(cluster, None, name, batch)
    planner = Planner(costs)
    least = planner.least_memory()[1].memory
    known = {rival: found.memory for rival, (_, found) in baselines(costs).items()}
    known["the best plan"] = predict(planner.best(), costs).memory
    assert least <= min(known.values()), min(known, key=lambda rival: known[rival])


# -- what cannot be planned ------------------------------------------------------------------------


def test_more_workers_than_any_layer_can_use_are_refused() -> None:
    graph = capture(nn.Linear(2, 2), torch.zeros(2, 2))
    with pytest.raises(PlanError) as error:
        plan(graph, cluster="local", workers=64)
    assert "can be split over 64 workers; the most that a layer can use is 8" in str(error.value)
    assert plan(graph, cluster="local", workers=8).world == 8


@pytest.mark.parametrize("workers", [0, -1])
def test_a_number_of_workers_below_one_is_refused(workers: int) -> None:
    graph = capture(nn.Linear(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="workers"):
        plan(graph, cluster="4x10Gb", workers=workers)


# -- plans that explain themselves -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "cluster"), [("digits", "4x10Gb"), ("alexnet", "2x4@1Gb/4:1")])
def test_the_chosen_split_is_among_the_alternatives(name: str, cluster: str) -> None:
    graph = graph_of(name, 64, *((64, 64) if name == "alexnet" else ()))
    found = plan(graph, cluster=cluster)
    for layer in graph.layers:
        if layer.op != "input":
            alternatives = found.explain(layer.name)
            assert alternative(alternatives, found.layers[layer.name])
            assert [a.total for a in alternatives] == sorted(a.total for a in alternatives)


def test_under_the_plan_of_least_cost_every_chosen_split_is_the_best_alternative() -> None:
    costs = small("p100-4x4")
    found = examine(costs, chosen=Planner(costs).best())
    for layer in Planner(costs).layers:
        alternatives = found.explain(layer.name)
        chosen = alternative(alternatives, found.layers[layer.name])
        assert isclose(chosen.total, alternatives[0].total, rel_tol=1e-9), layer.name


def test_alternatives_cost_what_the_plan_with_them_is_predicted_to_cost() -> None:
    costs = small("4x10Gb")
    best = Planner(costs).best()
    found = examine(costs, chosen=best)
    here = predict(best, costs).seconds
    chosen = alternative(found.explain("classifier.1"), best.layers["classifier.1"])
    for other in found.explain("classifier.1")[:10]:
        changed = complete(costs.graph, 4, {**best.layers, "classifier.1": other.config})
        step = predict(changed, costs).seconds - here
        assert step == pytest.approx(other.total - chosen.total, abs=1e-12 + 1e-9 * here)


def test_a_split_of_channels_and_filters_is_found_among_the_alternatives_of_a_relu() -> None:
    costs = costs_of("4x10Gb", None, "digits", 32)
    found = examine(costs, chosen=Plan.uniform(costs.graph, f=2, c=2))
    for layer in Planner(costs).layers:
        configs = [a.config for a in found.explain(layer.name)]
        assert usual(layer, found.layers[layer.name]) in configs, layer.name


def test_an_unknown_layer_is_answered_with_the_nearest(table_2: Plan) -> None:
    with pytest.raises(PlanError, match=r"no layer 'conv' to explain; did you mean 'conv\d'\?"):
        table_2.explain("conv")
    with pytest.raises(PlanError, match="no layer 'input' to explain"):
        table_2.explain("input")
    with pytest.raises(PlanError, match=r"no layer 'zzz' to explain$"):
        table_2.explain("zzz")


def test_a_plan_that_nobody_examined_says_that_it_cannot_explain() -> None:
    made = Plan.uniform(graph_of("digits", 32), n=2)
    with pytest.raises(PlanError, match=r"only a plan that shardwise\.plan has made"):
        made.explain("6")


def test_a_planned_plan_is_the_same_after_a_round_trip_through_json(
    table_2: Plan, tmp_path: Path
) -> None:
    planned = [table_2, plan(graph_of("digits", 32), cluster="taihulight", workers=16)]
    for made in planned:
        made.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert made == made and loaded == made
        assert loaded.to_json() == made.to_json() and loaded.findings is None


def test_a_planned_plan_prints_its_costs_and_those_of_its_rivals(table_2: Plan) -> None:
    text = str(table_2)
    assert text.startswith("plan for 16 workers of k80x16")
    for words in ("fc", "f=2", "this plan", *table_2.findings.rivals):
        assert words in text


# -- rivals ----------------------------------------------------------------------------------------


def test_no_rival_takes_a_shorter_step() -> None:
    for name, batch in (("digits", 64), ("unet3d", 4)):
        found = plan(graph_of(name, batch), cluster="2x2@1Gb/4:1").findings
        assert found.rivals
        assert all(found.trace.seconds <= r.step_seconds * ROUNDING for r in found.rivals.values())


@pytest.mark.parametrize("cap", (None, 240 << 20))
def test_where_a_loss_needs_all_classes_no_plan_and_no_rival_splits_them(cap: int | None) -> None:
    graph, cluster = graph_of("alexnet", 16, 64, 64), Cluster.load("4x1Gb")
    costs = Costs(graph, cluster, training=Training(output="local"))
    free = Training(output="local", whole_classes=False)
    assert not wanted(examine(Costs(graph, cluster, training=free)), costs)
    found = examine(costs, cap=cap)
    last = graph[graph.outputs[0]]
    plans = [found, *(rival.plan for rival in found.findings.rivals.values())]
    plans += [replaced(found, last.name, a.config) for a in found.findings.explain(last.name)]
    assert len(plans) > 5
    for made in plans:
        split = Split.of(last, made.config(last, graph), made.world)
        boxes = STRATEGIES[last.op].output(split).bounds
        assert ((boxes[:, 1] == [0, 1000]).all(axis=1) | (boxes[:, 0, 0] == boxes[:, 0, 1])).all()


def replaced(plan: Plan, layer: str, config: Config) -> Plan:
    return replace(plan, layers={**plan.layers, layer: config})


def test_sample_parallelism_is_always_compared_and_its_best_degree_only_if_it_differs() -> None:
    costs = costs_of("4x10Gb", None, "digits", 3)  # fewer samples than workers
    rivals = baselines(costs)
    assert str(rivals["sample (DDP)"][0].layers["6"]) == "n=3"
    best = rivals.get("sample, best degree", rivals["sample (DDP)"])
    assert best[1].seconds <= rivals["sample (DDP)"][1].seconds
    assert all(found.world == 4 for found, _ in rivals.values())


def test_bytes_for_people_have_no_exponents() -> None:
    assert size(1023 << 20) == "1023 MiB" and size(1 << 30) == "1 GiB" and size(999) == "999 B"


def test_the_table_of_alternatives_is_in_the_order_of_its_totals() -> None:
    found = plan(zoo.build("digits"), torch.zeros(8, 1, 8, 8), cluster="2x1Gb")
    columns = {
        str(column.header): list(column.cells) for column in explain_table(found, "6").columns
    }
    totals = [float(str(cell)) for cell in columns["total ms"]]
    assert totals == sorted(totals) and "chosen" in columns[""]
