"""Pages of ``docs`` that promise to be complete are."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from jupyter_torchdist import states
from jupyter_torchdist.planning.accelerate_config import SECTIONS
from jupyter_torchdist.planning.accelerate_keys import DYNAMO, FSDP, TOP
from jupyter_torchdist.protocol.options.strategy import STRATEGY_OPTIONS

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
OPTION_TESTS = DOCS / "development" / "option-tests.md"


def test_every_option_of_a_strategy_has_its_test() -> None:
    rows = [line.split("|") for line in OPTION_TESTS.read_text(encoding="utf-8").splitlines()]
    tested = {name for row in rows if len(row) == 4 and "::" in row[2] for name in re.findall(r"`(\w+)`", row[1])}
    assert [option.name for option in STRATEGY_OPTIONS if option.name not in tested] == []


def test_every_state_of_the_notebook_is_told() -> None:
    text = (DOCS / "notebook-state.md").read_text(encoding="utf-8")
    assert [adapter.name for adapter in states.TABLE if f"| `{adapter.name}` |" not in text] == []


def test_the_tests_that_are_named_exist() -> None:
    named = re.findall(r"`([\w/]+)::(\w+)`", OPTION_TESTS.read_text(encoding="utf-8"))
    assert len(named) > 60
    assert [f"{path}::{name}" for path, name in named if name not in _functions(path)] == []


def test_the_checks_of_pipelines_that_are_named_exist() -> None:
    named = re.findall(r"`(check_\w+)`", (DOCS / "coming-from" / "sagemaker-page.md").read_text(encoding="utf-8"))
    known = {**_functions("strategies/pipelines"), **_functions("strategies/pipeline_schedules")}
    assert len(named) > 20 and [name for name in named if name not in known] == []


def test_they_are_of_the_option_beside_which_they_stand() -> None:
    """Each option is named by a test of its row, and each test names an option of its row."""
    text = OPTION_TESTS.read_text(encoding="utf-8").partition("## What PyTorch")[0]
    wrong = []
    for options, tests in re.findall(r"^\| ((?:(?:, )?`(?:--)?[\w-]+`)+) \| (.*) \|$", text, re.M):
        wanted = {name.replace("-", "_") for name in re.findall(r"`(?:--)?([\w-]+)`", options)}
        named = {(path, name): _names_in(path, name) & wanted for path, name in re.findall(r"`([\w/]+)::(\w+)`", tests)}
        wrong += [f"{'::'.join(test)} names none of {options}" for test, names in named.items() if not names]
        wrong += [f"no test of its row names {option}" for option in wanted - set().union(*named.values())]
    assert not wrong, "\n".join(wrong)


def _names_in(path: str, function: str) -> set[str]:
    """Words of a test and of what it uses of its own module."""
    tree, words = _functions(path), _words(_functions(path)[function])
    return words.union(*[_words(tree[name]) for name in words & tree.keys()])


def _words(source: str) -> set[str]:
    return set(re.findall(r"[a-z]\w*|[A-Z]\w*", source.replace("-", "_")))


@functools.cache
def _functions(path: str) -> dict[str, str]:
    """The source of each function and constant of a test module, with its decorators."""
    text = (TESTS / f"{path}.py").read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = "\n".join(ast.unparse(part) for part in (*node.decorator_list, node))
        elif isinstance(node, ast.Assign):
            found |= {target.id: ast.unparse(node) for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_every_key_of_accelerate_is_explained() -> None:
    text = (DOCS / "coming-from" / "accelerate-keys.md").read_text(encoding="utf-8")
    assert [key for key in (*TOP, *FSDP, *DYNAMO, *SECTIONS) if f"`{key}`" not in text] == []


def test_links_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page.name} → {target}"
