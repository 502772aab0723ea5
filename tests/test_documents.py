"""What README and docs tell a reader to type runs, their links lead somewhere, and the reference
says what the code says.

Shell blocks run line by line, in one temporary folder per document. A Python or YAML block whose
first line is a comment with a file's name is written to that file; the other Python blocks of a
document are one script. A block after `<!-- not run: WHY -->` is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from commands import ROOT, run_command
from shardwise.planner.best_plan import size

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"# ([\w./]+\.(?:py|yaml))")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
NOT_RUN = 8  # blocks that a machine without a cluster cannot run, at most
NEEDS_ROOT = "shardwise emulate"


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    reason: str | None  # why it is not run

    @property
    def file(self) -> str | None:
        match = FILE.match(self.text)
        return match[1] if match else None

    @property
    def commands(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(document: Path) -> list[Block]:
    return [
        Block(match["language"], match["text"], match["reason"])
        for match in BLOCK.finditer(document.read_text())
    ]


def script(document: Path) -> str:
    """The Python blocks without a name, as one program."""
    parts = [b.text for b in blocks(document) if b.language == "python" and not b.file]
    return "\n".join(parts)


def has_commands(document: Path) -> bool:
    return any(b.language in ("sh", "python") and not b.reason for b in blocks(document))


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", list(filter(has_commands, DOCUMENTS)), ids=name_of)
def test_what_a_document_tells_to_type_runs(document: Path, tmp_path: Path) -> None:
    cache = {"SHARDWISE_CACHE": str(tmp_path / "cache")}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    unnamed = [b for b in blocks(document) if b.language == "python" and not b.file]
    commands = []
    for block in blocks(document):
        if block.reason:
            continue
        if block.file and block.language in ("python", "yaml"):
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "sh":
            commands += block.commands
            for command in block.commands:
                check(command, tmp_path, cache)
        elif unnamed and block is unnamed[-1]:
            (tmp_path / "blocks.py").write_text(script(document))
            check("python blocks.py", tmp_path, cache)
    for block in blocks(document):
        used = any(block.file in command for command in commands) if block.file else True
        assert used or block.reason, f"no command uses {block.file}"


def check(command: str, folder: Path, environment: dict[str, str]) -> None:
    if command.startswith("python examples/"):  # test_examples.py runs it
        assert (folder / command.split()[1]).is_file(), command
        return
    if command.startswith(NEEDS_ROOT) and os.geteuid() != 0:
        return
    code, output = run_command(command, folder, **environment)
    assert code == 0, f"$ {command}\n{output}"


def test_predicted_figures_of_the_readme_are_what_its_command_prints(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"\| `(shardwise plan [^`]+)` \|", readme)
    code, output = run_command(f"{command} --json", tmp_path)
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    steps = [found["step_seconds"]]
    steps += [found["rivals"][name]["step_seconds"] for name in ("sample (DDP)", "OWT")]
    moved = [found["moved_bytes"], found["rivals"]["sample (DDP)"]["moved_bytes"]]
    (row,) = [line for line in readme.splitlines() if command in line and line.startswith("|")]
    for figure in (*(f"{step:.3g} s" for step in steps), *map(size, moved)):
        assert figure in row, figure


def test_few_blocks_are_not_run() -> None:
    left_out = [block for document in DOCUMENTS for block in blocks(document) if block.reason]
    assert len(left_out) <= NOT_RUN


def test_every_block_says_its_language() -> None:
    for document in DOCUMENTS:
        fences = re.findall(r"^```(\w*)$", document.read_text(), re.MULTILINE)
        known = {"sh", "python", "yaml", "json", "text", "diff"}
        assert fences[1::2] == [""] * (len(fences) // 2), name_of(document)
        assert set(fences[::2]) <= known, name_of(document)


def test_links_lead_to_files_that_are_there() -> None:
    for document in DOCUMENTS:
        for link in LINK.findall(document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{name_of(document)}: {link}"


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = ROOT / "docs/README.md"
    linked = {(contents.parent / link).resolve() for link in LINK.findall(contents.read_text())}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page != contents}
    assert pages <= linked


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_says_what_the_code_says() -> None:
    found = generator()
    for page, write in found.PAGES.items():
        assert (found.FOLDER / page).read_text() == write(), f"run docs/generate.py: {page}"


def test_every_public_name_setting_and_command_says_what_it_is_for() -> None:
    found = generator()
    for page, heading in (("api.md", "\n## `"), ("commands.md", "\n## shardwise ")):
        for part in found.PAGES[page]().split(heading)[1:]:
            lines = [line for line in part.splitlines()[1:] if line.strip()]
            assert lines and not lines[0].startswith(("|", "`")), part
