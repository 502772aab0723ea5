"""The table of habits: every row names tests, and they exist."""

from __future__ import annotations

import re

from commands import ROOT

ROW = re.compile(r"^\| (?P<habit>[^|]+) \| (?P<answer>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
PAGE = ROOT / "docs/coming-from-ddp.md"


def test_every_row_of_the_table_of_habits_names_tests_that_exist() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    known = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    rows = [row for row in ROW.finditer(PAGE.read_text()) if row["tests"] != "test"]
    assert len(rows) > 40
    for row in rows:
        named = set(re.findall(r"`(test_\w+)`", row["tests"]))
        assert named and named <= known, f"{row['habit']}: {named - known}"
        assert re.match("works|refused|counts", row["answer"]), row["answer"]
