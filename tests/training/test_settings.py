"""Settings: what files and the command line may say, and what they are told when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.training.settings import Settings, read_settings


def test_the_command_line_counts_more_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: resnet34_cifar\nlr: 1e-3\nbatch: 32\nmean: [0.5, 0.5, 0.5]\n")
    found = read_settings(path, {"batch": "48", "crop": "24x24", "betas": "0.8,0.9"})
    assert (found.model, found.lr, found.batch) == ("resnet34_cifar", 1e-3, 48)
    assert (found.mean, found.crop, found.betas) == ((0.5, 0.5, 0.5), (24, 24), (0.8, 0.9))


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert read_settings(tmp_path / "run.yaml") == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "there is no setting 'epoch'; did you mean 'epochs'?"),
        ("epochs: ten", "epochs='ten': input should be a valid integer"),
        ("epochs: true", "epochs=True: input should be a valid integer"),
        ("epochs: 0", "epochs=0: input should be greater than or equal to 1"),
        ("lr: -1", "lr=-1: input should be greater than 0"),
        ("lr: .nan", "lr=nan: input should be a finite number"),
        (
            "optimizer: adamax",
            "optimizer='adamax': input should be 'sgd', 'adam', 'adamw' or 'lars'",
        ),
        ("seed: 1.5", "seed=1.5: input should be a valid integer"),
        ("std: [1, 0]", "std.1=0: input should be greater than 0"),
        ("size: [8]", "size.1"),
        ("plan: owt\nsplit: n=2", "plan and split are both given"),
        ("momentum: 0", "nesterov needs a momentum above 0"),
        ("mixup: 0.2\noutput: local", "mixup needs output full"),
        ("- epochs", "must hold settings, such as 'epochs: 10'"),
        ("a: [", "is not YAML"),
        ("options: 3", "options=3: input should be a valid dictionary"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ShardwiseError) as raised:
        read_settings(path)
    assert message in str(raised.value) and str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match=r"no\.yaml' cannot be read: No such file"):
        read_settings(tmp_path / "no.yaml")


def test_every_setting_says_what_it_is() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description and field.description.endswith((".", ")")), name
