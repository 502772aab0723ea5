"""Clusters: presets, files, shorthands, levels, and the one sentence that bad input gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shardwise.cluster.cluster import Cluster, Device, Link, presets
from shardwise.errors import ShardwiseError
from shardwise.units import parse_flops, parse_rate, parse_ratio, parse_seconds, parse_size

PAPERS = {"k80x16", "p100-4x4", "lassen", "cori-haswell", "taihulight", "xeon5120-edr"}
TODAY = {"h100x8", "h200x8", "a100x4-pcie", "workstations-2"}
GOOD: dict[str, Any] = {
    "name": "small",
    "device": {"flops": "1Tflop/s", "memory_bandwidth": "100GB/s", "memory": "12GiB"},
    "links": [
        {"name": "node", "count": 2, "latency": "2.5us", "bandwidth": "10Gb"},
        {"name": "switch", "latency": 0.0001, "bandwidth": 1e9},
    ],
}


def refusal(text: str | Path) -> str:
    """The sentence that loading gets."""
    with pytest.raises(ShardwiseError) as caught:
        Cluster.load(text)
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence and "Traceback" not in sentence
    return sentence


def changed(path: str, value: Any) -> dict[str, Any]:
    """A good description with one field set, or removed where the value is `...`."""
    data = json.loads(json.dumps(GOOD))
    *places, last = path.split(".")
    inner: Any = data
    for place in places:
        inner = inner[int(place) if place.isdigit() else place]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return data


# -- units -----------------------------------------------------------------------------------------


def test_rates_are_in_bits_for_b_and_in_bytes_for_B_or_no_unit() -> None:
    for text in ("10Gb", "10Gbit", "10 gbit/s", "10Gbps", "1.25GB/s", "1.25gB", "1.25e9"):
        assert parse_rate(text) == 1.25e9
    assert parse_rate("600mbit") == 75e6 and parse_rate("1GiB/s") == 2**30


def test_sizes_times_speeds_and_ratios_have_units() -> None:
    assert parse_size("12GiB") == 12 * 2**30 and parse_size("16GB") == 16 * 10**9
    assert parse_size("1.5kB") == 1500 and parse_size("4096") == 4096
    assert parse_seconds("2.5us") == 2.5e-6 and parse_seconds("20us") == 20e-6
    assert parse_seconds("3ms") == 3e-3 and parse_seconds("0.5") == 0.5
    assert parse_flops("15.7Tflop/s") == 15.7e12 and parse_flops("2 GFLOPS") == 2e9
    assert parse_ratio("4:1") == 4 and parse_ratio("1.5") == 1.5


@pytest.mark.parametrize("text", ["", "fast", "10 parsec", "-1Gb", "1e999Gb", "10Gb/h"])
def test_what_is_not_a_rate_is_named(text: str) -> None:
    with pytest.raises(ShardwiseError, match="is not a rate such as"):
        parse_rate(text)


# -- presets and files -----------------------------------------------------------------------------


def test_machines_of_the_papers_and_of_today_and_this_one_are_presets() -> None:
    assert set(presets()) == PAPERS | TODAY | {"local"}


@pytest.mark.parametrize("name", sorted(TODAY))
def test_what_is_assumed_of_machines_of_today_is_marked(name: str) -> None:
    text = presets()[name].read_text()
    assert "No measurement" in text and "Assumed:" in text and "Public vendor data" in text


@pytest.mark.parametrize("name", sorted(presets()))
@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_preset_is_the_same_after_a_round_trip(name: str, suffix: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    cluster.save(tmp_path / f"copy{suffix}")
    assert Cluster.load(tmp_path / f"copy{suffix}") == cluster
    assert Cluster.load(str(tmp_path / f"copy{suffix}")) == cluster
    assert Cluster.model_validate(yaml.safe_load(cluster.to_yaml())) == cluster


def test_presets_hold_what_the_papers_say() -> None:
    worlds = {name: Cluster.load(name).world for name in presets()}
    assert worlds["k80x16"] == worlds["p100-4x4"] == 16 and worlds["xeon5120-edr"] == 8
    assert worlds["lassen"] == 2048 and worlds["taihulight"] == 1024 and worlds["local"] == 1
    k80 = Cluster.load("k80x16")
    assert 6 * 512 * 4096 * 4096 / k80.device.flops == pytest.approx(20.4e-3, rel=1e-3)  # P4, T. 2
    assert k80.links[0].shared and k80.links[0].staged and k80.links[0].bandwidth == 2e9
    inside, across = Cluster.load("taihulight").links
    assert inside.rate == 12e9 and across.rate == 256 * inside.rate / 4  # P5, section 5.1


def test_numbers_in_a_file_may_have_units(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(GOOD).replace("1000000000.0", "1e9"))  # to YAML 1e9 is text
    cluster = Cluster.load(path)
    assert cluster.device == Device(flops=1e12, memory_bandwidth=1e11, memory=12 * 2**30)
    assert cluster.links[0] == Link(name="node", count=2, latency=2.5e-6, bandwidth=1.25e9)
    assert cluster.links[1].bandwidth == 1e9


# -- shorthands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts", "rates"),
    [
        ("4x10Gb", [4], [10]),
        ("8@600mbit", [8], [0.6]),
        ("4x1GB/s", [4], [8]),
        ("2x4@1Gb/4:1", [4, 2], [1, 1]),
        ("2x4@1Gb", [4, 2], [1, 4]),
        ("2x4@1Gb/s/4:1", [4, 2], [1, 1]),
        ("4x2x8@10Gb/2:1/4:1", [8, 2, 4], [10, 40, 20]),
    ],
)
def test_a_shorthand_gives_counts_outside_in_and_ratios_inside_out(
    text: str, counts: list[int], rates: list[float]
) -> None:
    cluster = Cluster.load(text)
    assert [link.count for link in cluster.links] == counts
    assert [link.rate * 8 / 1e9 for link in cluster.links] == pytest.approx(rates)
    assert all(link.latency == 50e-6 and not link.shared for link in cluster.links)
    assert cluster.device == Cluster.load("local").device
    assert cluster.name == text and cluster.world == np.prod(counts)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0x10Gb", "cluster '0x10Gb': count: Input should be greater than or equal to 1"),
        ("4x10parsec", "cluster '4x10parsec': '10parsec' is not a rate such as 10Gb"),
        ("2x4@1Gb/4:1/2:1", "has 2 ratios for 1 levels of uplinks"),
        ("2x4@1Gb/four", "'four' is not a ratio such as 4:1"),
        ("2x4@1Gb/0.5:1", "oversubscription: Input should be greater than or equal to 1"),
        ("9999999x10Gb", "9999999 workers are more than the limit of 1000000"),
    ],
)
def test_a_bad_shorthand_gets_one_sentence(text: str, sentence: str) -> None:
    assert sentence in refusal(text)


# -- levels ----------------------------------------------------------------------------------------


def test_units_and_groups_follow_the_ranks_from_the_inside_out() -> None:
    cluster = Cluster.load("2x2x3@1Gb")
    assert cluster.units(0).tolist() == list(range(12))
    assert cluster.units(1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert cluster.units(2).tolist() == [0] * 6 + [1] * 6
    for level in range(2):
        assert np.array_equal(cluster.groups(level), cluster.units(level + 1))
    assert cluster.groups(2).tolist() == [0] * 12
    assert cluster.units(1).dtype == np.int64 and cluster.groups(2).dtype == np.int64
    for level in (-1, 3):
        with pytest.raises(ShardwiseError, match=f"has no level {level}"):
            cluster.groups(level)


def test_fewer_workers_fill_levels_in_part() -> None:
    cluster = Cluster.load("2x4@1Gb").with_workers(6)
    assert cluster.world == 6 and cluster.groups(0).tolist() == [0, 0, 0, 0, 1, 1]
    assert cluster.with_workers(8).world == 8


def test_an_outermost_level_without_a_count_grows() -> None:
    cluster = Cluster.load("taihulight").with_workers(600)
    assert cluster.world == 600 and cluster.groups(0).max() == 2
    assert cluster.groups(1).tolist() == [0] * 600
    assert Cluster.load("local").with_workers(4).units(0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (17, "cluster 'p100-4x4': 17 workers are more than its levels hold: 4 x 4$"),
        (0, "cluster 'p100-4x4': workers: Input should be greater than or equal to 1$"),
    ],
)
def test_workers_that_there_are_not_are_refused(workers: int, sentence: str) -> None:
    with pytest.raises(ShardwiseError, match=sentence):
        Cluster.load("p100-4x4").with_workers(workers)


def test_a_cluster_is_frozen_and_hashable() -> None:
    cluster = Cluster.load("lassen")
    assert hash(cluster) == hash(Cluster.load("lassen"))
    with pytest.raises(ValueError, match="frozen"):
        cluster.workers = 3  # pyright: ignore[reportAttributeAccessIssue]


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("name", ..., "name: Field required"),
        ("name", "", "name: String should have at least 1 character"),
        ("device.flops", ..., "device.flops: Field required"),
        ("device.flops", 0, "device.flops: Input should be greater than or equal to 1000000"),
        ("device.flops", "1e19", "device.flops: Input should be less than or equal to"),
        ("device.flops", True, "device.flops: Input should be a number, not true or false"),
        ("device.flops", "fast", "device.flops: 'fast' is not a speed such as 15.7Tflop/s"),
        ("device.flops", None, "device.flops: Input should be a valid number"),
        ("device.flops", float("nan"), "device.flops: Input should be"),
        ("device.memory", "1kB", "device.memory: Input should be greater than or equal to 1048576"),
        ("device.memory", "12Gb", "device.memory: '12Gb' is not a size in bytes"),
        ("device.memory_bandwidth", 5, "device.memory_bandwidth: Input should be greater than"),
        ("device.launch", -1, "device.launch: Input should be greater than or equal to 0"),
        ("device.cores", 4, "device.cores: Extra inputs are not permitted"),
        ("links", [], "links: Tuple should have at least 1 item"),
        ("links", [7], "links.0: Input should be a valid dictionary"),
        ("links.0.count", ..., "links.0.count is missing; only the outermost level may"),
        ("links.0.count", 0, "links.0.count: Input should be greater than or equal to 1"),
        ("links.0.count", 1.5, "links.0.count: Input should be a valid integer"),
        ("links.0.count", True, "links.0.count: Input should be a number, not true or false"),
        ("links.0.latency", "1 hour", "links.0.latency: '1 hour' is not a time such as 2.5us"),
        ("links.0.latency", 11, "links.0.latency: Input should be less than or equal to 10"),
        ("links.0.bandwidth", ..., "links.0.bandwidth: Field required"),
        ("links.0.bandwidth", "1e16", "links.0.bandwidth: Input should be less than"),
        ("links.0.bandwidths", [1e9], "links.0.bandwidths has 1 rates for"),
        ("links.0.shared", "perhaps", "links.0.shared: Input should be a valid boolean"),
        ("links.0.oversubscription", 0.5, "links.0.oversubscription: Input should be greater than"),
        ("links.0.sum_bandwidth", 0, "links.0.sum_bandwidth: Input should be greater than"),
        ("links.1.count", 10**7, "20000000 workers are more than the limit of 1000000"),
        ("workers", 0, "workers: Input should be greater than or equal to 1"),
        ("colour\nred", 1, "colour red: Extra inputs are not permitted"),
    ],
)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_bad_field_gets_one_sentence_that_names_file_and_field(
    field: str, value: Any, sentence: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"x{suffix}"
    data = changed(field, value)
    path.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data))
    assert refusal(path).startswith(f"cluster file {str(path)!r}: {sentence}")


def test_a_ratio_that_yaml_reads_as_base_sixty_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    data = changed("links.0.oversubscription", "RATIO")
    path.write_text(yaml.safe_dump(data).replace("RATIO", "4:1"))
    assert "oversubscription: 241 is more than 60:1; write 4:1 as 4" in refusal(path)
    path.write_text(yaml.safe_dump(data).replace("RATIO", '"4:1"'))
    assert Cluster.load(path).links[0].oversubscription == 4


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.yaml", "name: [1", "is not valid YAML in line 1: "),
        ("x.yaml", "a: 1\nb\n\tc", "is not valid YAML in line"),
        ("x.yaml", "a: !!python/object:os.system {}", "could not determine a constructor"),
        ("x.yaml", "a: !!bool perhaps", "is not valid YAML: "),
        ("x.yaml", "a: \x00", "is not valid YAML: "),
        ("x.yaml", "", "must hold a mapping with name, device and links"),
        ("x.yaml", "- 1\n- 2", "must hold a mapping with name, device and links"),
        ("x.yml", "just text", "must hold a mapping with name, device and links"),
        ("x.yaml", "1: 2", "Field required"),
        ("x.json", "{", "is not valid JSON: "),
        ("x.json", "[" * 100_000, "is not valid JSON: "),
    ],
)
def test_a_file_that_is_no_description_gets_one_sentence(
    name: str, text: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    message = refusal(tmp_path / name)
    assert message.startswith(f"cluster file {str(tmp_path / name)!r}") and sentence in message


def test_a_file_that_cannot_be_read_or_written_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in refusal(tmp_path / "folder.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in refusal(tmp_path / "bytes.yaml")
    assert "cannot be read" in refusal("a\0b.yaml")
    cluster = Cluster.load("local")
    for path, sentence in [("x.txt", "must end in .yaml, .yml or .json"), ("no/x.yaml", "No such")]:
        with pytest.raises(ShardwiseError, match=sentence):
            cluster.save(tmp_path / path)


@pytest.mark.parametrize("text", ["", "k80", "4x10", "x10Gb", "4x", "no/such/file.yaml", "a\nb"])
def test_an_unknown_cluster_is_told_the_presets_and_the_shorthand(text: str) -> None:
    message = refusal(text)
    assert all(name in message for name in PAPERS | TODAY | {"local", "4x10Gb", "2x4@1Gb/4:1"})
