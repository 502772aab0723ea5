"""The table of habits: every row names tests, and they exist."""

from __future__ import annotations

import re

from commands import ROOT

ROW = re.compile(r"^\| (?P<habit>[^|]+) \| (?P<answer>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
PAGE = ROOT / "docs/coming-from-ddp.md"


def test_every_row_of_the_table_of_habits_names_tests_that_exist() -> None:
    texts = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    known = {name: text for text in texts for name in re.findall(r"def (test_\w+)", text)}
    rows = [row for row in ROW.finditer(PAGE.read_text()) if row["tests"] != "test"]
    assert len(rows) >= 120
    for row in rows:
        named = re.findall(r"`(test_\w+)(?:\[([^\]]+)\])?`", row["tests"])
        assert named, row["habit"]
        for name, case in named:
            assert name in known, f"{row['habit']}: {name}"
            assert not case or case in known[name], f"{name} has no {case!r}"
        assert re.match("works|refused|counts", row["answer"]), row["answer"]
