"""Options that stand in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.verbs import defaults


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for notebooks below a project's; the user's configuration is empty."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        folder = tmp_path / "project" / "notebooks"
        folder.mkdir(parents=True)
        yield folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_files_nothing_is_set(project: Path) -> None:
    assert defaults.load(project) == Options()


def test_the_nearest_file_wins(project: Path) -> None:
    write(project.parents[1] / "config/torchdist/torchdist.toml", "ranks = 8\ngrace = '1m'\nfresh = true\n")
    write(project.parent / "pyproject.toml", "[tool.torchdist]\nranks = 4\nwatch = 'text'\n")
    write(project / "torchdist.toml", "ranks = 2\nexclude = ['big', 'huge']\nout = ['model', 'losses']\n")
    options = defaults.load(project)
    assert (options.ranks, options.watch, options.grace, options.fresh) == (2, "text", 60.0, True)
    assert (options.exclude, options.out) == (("big", "huge"), ("model", "losses"))


def test_the_cell_wins_over_files(project: Path) -> None:
    write(project / "torchdist.toml", "ranks = 2\nbackend = 'gloo'\n")
    assert defaults.options("--ranks 3", project).ranks == 3
    options = defaults.options("--gpus 1", project)
    assert (options.gpus, options.ranks) == (1, None)
    write(project / "torchdist.toml", "gpus = 2\nbackend = 'nccl'\n")
    options = defaults.options("--ranks 2", project)
    assert (options.gpus, options.ranks, options.backend) == (None, 2, None)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("rank = 2", "there is no option 'rank'", "did you mean ranks?"),
        ("ranks = 0", "expected at least 1", "--ranks N"),
        ("fresh = 1", "expected true or false", "fresh = true"),
        ("ranks = [1, 2]", "expected a whole number", "--ranks N"),
        ("watch = 'ful'", "expected one of full, compact, text, off", "--watch"),
        ("ranks = = 2", "cannot be read", "correct the file"),
    ],
)
def test_mistakes_name_the_file_and_the_remedy(project: Path, text: str, message: str, hint: str) -> None:
    path = project / "torchdist.toml"
    write(path, text)
    with pytest.raises(OptionError) as caught:
        defaults.load(project)
    assert str(path) in caught.value.message and message in caught.value.message
    assert hint in caught.value.hint


def test_projects_that_do_not_speak_of_us_are_not_our_business(project: Path) -> None:
    write(project / "pyproject.toml", "this = is = not = toml")
    write(project.parent / "pyproject.toml", "[tool.torchdist]\nranks = 4\n")
    assert defaults.load(project).ranks == 4


def test_a_table_is_asked_for(project: Path) -> None:
    write(project / "pyproject.toml", "[tool]\ntorchdist = 3\n")
    with pytest.raises(OptionError, match="not a table"):
        defaults.load(project)
