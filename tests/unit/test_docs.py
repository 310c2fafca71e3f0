"""Pages of ``docs`` that promise to be complete are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from jupyter_torchdist.planning.accelerate_config import SECTIONS
from jupyter_torchdist.planning.accelerate_keys import DYNAMO, FSDP, TOP
from jupyter_torchdist.protocol.strategy_options import STRATEGY_OPTIONS

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"


def test_every_option_of_a_strategy_has_its_test() -> None:
    rows = [line.split("|") for line in (DOCS / "options.md").read_text(encoding="utf-8").splitlines()]
    tested = {name for row in rows if len(row) == 4 and "::" in row[2] for name in re.findall(r"`(\w+)`", row[1])}
    assert [option.name for option in STRATEGY_OPTIONS if option.name not in tested] == []


def test_the_tests_that_are_named_exist() -> None:
    named = re.findall(r"`([\w/]+)::(\w+)`", (DOCS / "options.md").read_text(encoding="utf-8"))
    assert len(named) > 60
    functions = {path: _functions(TESTS / f"{path}.py") for path, _ in named}
    assert [f"{path}::{name}" for path, name in named if name not in functions[path]] == []


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_key_of_accelerate_is_explained() -> None:
    text = (DOCS / "huggingface.md").read_text(encoding="utf-8")
    assert [key for key in (*TOP, *FSDP, *DYNAMO, *SECTIONS) if f"`{key}`" not in text] == []


def test_links_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page.name} → {target}"
