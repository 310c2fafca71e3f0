"""Each case of ``cases/``, plainly and on ranks, through a real kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.differential.generated import a_case
from tests.differential.harness import Case, cases, differences, run
from tests.kernels import ForkServer
from tests.notebook import Notebook

DOCS = Path(__file__).parents[2] / "docs" / "differences.md"
ALL = list(cases())


PART = 3
"""Each third case runs always; the others take time that only ``make soak`` has."""


def _each(number: int, case: Case) -> object:
    return pytest.param(case, id=case.name, marks=[pytest.mark.soak] if case.soak or number % PART else [])


@pytest.fixture(scope="module")
def warm(kernels: ForkServer, shared_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for all cases that leave nothing but names."""
    environ = {"TORCHDIST_RUNTIME_DIR": str(shared_runtime), "TORCHDIST_SCRATCH": str(shared_runtime / "scratch")}
    with Notebook(tmp_path_factory.mktemp("differential"), environ, kernels) as notebook:
        yield notebook.load()


def _differ(case: Case, open_notebook: Callable[[], Notebook], directory: Path, ranks: int) -> None:
    plain = run(case, open_notebook(), directory / "plain")
    here = run(case, open_notebook(), directory / f"ranks{ranks}", ranks)
    found = differences(plain, here)
    if case.says:
        assert found, f"it does not differ any more: take the words away:\n{here.words}"
        assert case.says in here.words, f"{case.says!r} is not said:\n{here.words}"
    else:
        assert not found, "\n".join(found) + f"\n{here.words[-3000:]}"


@pytest.mark.parametrize("case", [_each(*numbered) for numbered in enumerate(ALL)])
def test_a_cell_leaves_the_same_on_two_ranks(
    case: Case, warm: Notebook, new_notebook: Callable[[], Notebook], home: Path, tmp_path: Path
) -> None:
    warm.run(f"import os\nos.environ['TORCHDIST_HOME'] = {str(home)!r}")
    _differ(case, new_notebook if case.own else lambda: warm, tmp_path / "work", 2)


@pytest.mark.soak
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in ALL])
def test_a_cell_leaves_the_same_on_one_rank(
    case: Case, warm: Notebook, new_notebook: Callable[[], Notebook], home: Path, tmp_path: Path
) -> None:
    warm.run(f"import os\nos.environ['TORCHDIST_HOME'] = {str(home)!r}")
    _differ(case, new_notebook if case.own else lambda: warm, tmp_path / "work", 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=a_case())
def test_generated_cells_leave_the_same(case: Case, warm: Notebook, home: Path, tmp_path: Path) -> None:
    warm.run(f"import os\nos.environ['TORCHDIST_HOME'] = {str(home)!r}")
    _differ(case, lambda: warm, tmp_path / "work", 2)


def test_each_difference_is_in_the_docs() -> None:
    text = DOCS.read_text()
    missing = {case.name: case.says for case in ALL if case.says and case.says not in text}
    assert not missing


def test_names_are_used_once() -> None:
    names = [case.name for case in ALL]
    assert len(names) == len(set(names))
