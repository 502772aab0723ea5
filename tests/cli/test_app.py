"""The command line: what it says, its exit codes, and that mistakes are one line."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

import pytest

import shardwise
from shardwise.verify import Comparison
from shardwise.verify.results import PlanResult

Run = tuple[int, str, str]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["verify", "train", "pack"]),
        (
            ["verify"],
            [
                "--workers",
                "--split",
                "--random-plans",
                "--plan",
                "--input",
                "--option",
                "--eval",
                "--dtype",
                "--device",
            ],
        ),
        (["pack"], ["--stripes", "--on-error", "--subset", "--size", "--num-classes"]),
        (["train"], ["--workers", "--epochs", "--batch", "--lr", "--seed", "--split"]),
    ],
)
def test_help_names_every_option(run, arguments: list[str], words: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(*arguments, "--help")
    assert code == 0
    assert all(word in out for word in words)


def test_version(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--version") == (0, f"shardwise {shardwise.__version__}\n", "")


def test_verify_proves_a_split_and_a_random_plan(run) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(
        "verify", "digits", "--workers", "2", "--split", "h=2", "--random-plans", "1",
        "--option", "width=4",
    )  # fmt: skip
    assert code == 0, err
    assert "split h=2" in out and "random plan, seed 0" in out
    for kind in ("output", "loss", "gradient", "statistics", "weight"):
        assert len(re.findall(rf"│ {kind} +│.* ok", out)) == 2
    assert "2 plans on 2 workers" in out and "equal to one device" in out


def test_verify_reads_a_plan_file_and_a_model_file(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import torch
    from torch import nn

    source = tmp_path / "net.py"
    source.write_text("from torch import nn\ndef build(f=4): return nn.Conv2d(3, f, 3)\n")
    graph = shardwise.capture(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 6, 7))
    plan = shardwise.Plan.uniform(graph, world=1)
    plan.save(tmp_path / "plan.json")
    code, out, err = run("verify", f"{source}:build", "--plan", str(tmp_path / "plan.json"))
    assert code == 0, err
    assert "1 plan on 1 worker, " in out
    code, _, err = run("verify", f"{source}:build", "--plan", str(tmp_path / "plan.json"),
                       "--option", "f=5")  # fmt: skip
    assert code == 2 and err.startswith("error: the plan was made for another model")


def test_a_difference_ends_with_exit_code_1(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plan = shardwise.Plan(2, {}, ((2, 3),), "0")
    wrong = PlanResult("split n=2", plan, (Comparison("weight", "fc.bias", 2e-9),))
    monkeypatch.setattr("shardwise.verify.by_name.verify_model", lambda request: [wrong])
    code, out, _ = run("verify", "digits")
    assert code == 1
    assert re.search(r"weight .* fc.bias .* 2.0e-09 .* FAILED", out)
    assert "different: weight fc.bias\n" in out and "1 plan FAILED" in out


def test_verify_shows_noise_where_it_arises_and_what_it_leaves_open(  # type: ignore[no-untyped-def]
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = shardwise.Plan(2, {}, ((2, 3),), "0")
    found = (
        Comparison("output", "output", 4e-7, noise=3e-7, origin="in 'layer.1'"),
        Comparison("gradient", "fc.weight", 3e1, noise=2.0, origin="in 'layer.1'"),
        Comparison("gradient", "fc.bias", 2e-6, noise=1e-6, origin="in 'layer.1'"),
    )
    results = [PlanResult("split n=2", plan, found)]
    monkeypatch.setattr("shardwise.verify.by_name.verify_model", lambda request: results)
    code, out, _ = run("verify", "digits")
    assert code == 0
    assert re.search(r"output .* output .* 4.0e-07 .* 3.0e-07 .* 3e-06 .* ok ", out)
    assert re.search(r"gradient .* fc.bias .* 2.0e-06 .* 1.0e-06 .* 1e-05 .* ok, 1 open", out)
    assert "it arises in 'layer.1'; limits are 10 times the noise" in out
    assert "open: 1 tensor of which one device itself keeps no digit" in out
    assert "worst: gradient fc.bias, relative error 2.0e-06, limit 1e-05" in out


def test_verify_tells_a_fault_in_words(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plan = shardwise.Plan(2, {}, ((2, 3),), "0")
    fault = Comparison("output", "output", inf, fault="1 of float64 instead of a scalar")
    results = [PlanResult("split n=2", plan, (fault,))]
    monkeypatch.setattr("shardwise.verify.by_name.verify_model", lambda request: results)
    code, out, _ = run("verify", "digits")
    assert code == 1
    assert "different: output (1 of float64 instead of a scalar)\n" in out


def test_verify_draws_whole_numbers_where_inputs_are_of_those(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = tmp_path / "conditional.py"
    source.write_text(
        "from torch import nn\n"
        "class Conditional(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv, self.table = nn.Conv2d(3, 4, 3), nn.Embedding(9, 4)\n"
        "    def forward(self, x, label):\n"
        "        return self.conv(x) + self.table(label)[:, :, None, None]\n"
    )
    given = ["verify", f"{source}:Conditional", "--input", "4x3x6x6", "--workers", "1"]
    code, out, err = run(*given, "--input", "4:int64:9")
    assert code == 0 and "equal to one device" in out, err
    code, _, err = run(*given, "--input", "4:int64:999")
    assert code == 2 and "fails on one device in layer 'table': IndexError" in err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_compares_evaluation_in_other_dtypes(run, dtype: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("verify", "digits", "--workers", "1", "--dtype", dtype, "--eval")
    assert code == 0, err
    assert "1 tensor compared: equal to one device" in out


def test_a_model_that_fails_on_one_device_is_one_line(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = tmp_path / "unlucky.py"
    source.write_text(
        "import torch\nfrom torch import nn\n"
        "class Unlucky(nn.Module):\n"
        "    def forward(self, x):\n"
        "        if torch.compiler.is_exporting(): return x\n"
        "        raise RuntimeError('out of luck\\nand of lines')\n"
        "def build(): return nn.Sequential(nn.Conv2d(3, 4, 3), Unlucky())\n"
    )
    code, out, err = run("verify", f"{source}:build", "--input", "2x3x6x6", "--workers", "1")
    sentence = "Sequential fails on one device in layer '1': RuntimeError: out of luck"
    assert (code, out, err) == (2, "", f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("Captured", "'digits' cannot be captured: KeyError: 'luck'"),
        ("run_on_workers", "'digits' cannot be verified: KeyError: 'luck'"),
        ("compare", "'digits' runs on one device, but not under split n=1: KeyError: 'luck'"),
    ],
)
def test_what_no_sentence_foresees_is_one_line_too(  # type: ignore[no-untyped-def]
    run, broken: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("luck")

    monkeypatch.setattr(f"shardwise.verify.by_name.{broken}", fail)
    code, out, err = run("verify", "digits", "--workers", "1")
    assert (code, out, err) == (2, "", f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("verify digit", "the zoo has no network 'digit'"),
        ("verify none.py:f", "the model file 'none.py' does not exist"),
        ("verify shardwise.zoo.digits:digits", "the input shape of 'shardwise.zoo.digits:digits'"),
        ("verify digits --input 2x1xax8", "input shape '2x1xax8': dimension 2 is 'a'"),
        ("verify digits --input 2x3x8x8", "Sequential cannot be captured for input 2x3x8x8"),
        ("verify digits --input 2x1:int65", "input '2x1:int65': 'int65' must be float, bool,"),
        ("verify digits --input 2x1:bool:x", "input '2x1:bool:x': 'bool:x' must be float, bool,"),
        ("verify digits --split q=2", "split 'q=2': 'q' is not an axis"),
        ("verify digits --workers 2 --split n=4", "split n=4 needs 4 workers, and there are 2"),
        ("verify digits --workers 0", "0 workers: there must be at least 1"),
        ("verify digits --random-plans -1", "-1 random plans"),
        ("verify digits --batch 0", "batch 0: there must be at least 1 sample"),
        ("verify digits --dtype int8", "dtype 'int8' must be one of float64, float32,"),
        ("verify digits --device tpu", "device 'tpu' must be one of cpu, cuda"),
        ("verify digits --plan none.json", "the plan file 'none.json' cannot be read"),
        ("verify digits --option width", "option 'width' must be written key=value"),
        ("verify digits --option depth=3", "building 'digits' failed with TypeError"),
        ("train --split n=4 --workers 2", "split n=4 needs 4 workers"),
        ("train --epochs 0", "epochs='0': input should be greater than or equal to 1"),
        ("train --lr -1", "lr='-1': input should be greater than 0"),
        ("emulate --hosts 2 --link 1gbit -- not-there", "the command 'not-there' cannot be found"),
        ("train nowhere.yaml", "the settings 'nowhere.yaml' cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments: str, sentence: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(*arguments.split())
    assert code == 2
    assert not out
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", ["verify", "verify digits --workers two", "nothing"])
def test_wrong_usage_has_exit_code_2_too(run, arguments: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(*arguments.split())
    assert code == 2
    assert not out and "Traceback" not in err
