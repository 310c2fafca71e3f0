"""Options that stand in files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
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
    ("text", "line"),
    [
        ("launcher = 'slurm'\n[option]\npartition = 'gpu'", "--nodes 2 --ranks 2"),
        ("hosts = ['a', 'b', 'c']", "--nodes 2:3 --restarts 1"),
        ("restarts = 3", "--hosts a,b,c --nodes 2:3"),
    ],
)
def test_the_cell_and_a_file_fit_together(project: Path, text: str, line: str) -> None:
    write(project / "torchdist.toml", text)
    assert defaults.options(line, project).nodes in (2, 3)
    write(project / "torchdist.toml", "ranks = 2")
    with pytest.raises(OptionError, match="--nodes"):
        defaults.options(line, project)


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


# -- files of other users


def ignored(directory: Path) -> str:
    options = defaults.load(directory)
    assert replace(options, ignored=()) == Options(), "nothing of it is used"
    (why,) = options.ignored
    return why


@pytest.mark.parametrize("name", ["torchdist.toml", "../pyproject.toml"])
@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_a_file_of_another_user_is_ignored_in_words(project: Path, name: str) -> None:
    path = project.parent / "pyproject.toml" if "pyproject" in name else project / name
    write(path, "env = ['PYTHONPATH=/tmp/evil']\n" if "torchdist" in name else "[tool.torchdist]\nranks = 4\n")
    os.chown(path, 65534, -1)
    assert ignored(project) == (
        f"{path} is ignored, because it belongs to nobody; if you trust it, give it with --config, or copy it"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a link away")
def test_a_link_that_another_user_made_is_ignored(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine.toml", "ranks = 4\n")
    (project / "torchdist.toml").symlink_to(tmp_path / "mine.toml")
    assert defaults.load(project).ranks == 4
    os.chown(project / "torchdist.toml", 65534, -1, follow_symlinks=False)
    assert "it belongs to nobody" in ignored(project)


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_file_that_others_can_write_is_ignored_in_words(project: Path, mode: int) -> None:
    path = project / "torchdist.toml"
    write(path, "ranks = 4\n")
    path.chmod(0o644)
    assert defaults.load(project).ranks == 4
    if os.getuid() == 0 and mode == 0o620:
        os.chown(path, -1, 4)  # a group that is not the user's own
    path.chmod(mode)
    assert ignored(project) == (
        f"{path} is ignored, because other users can write to it; chmod go-w makes it yours alone"
    )


def test_what_is_ignored_is_not_read_and_the_next_project_counts(project: Path) -> None:
    write(project / "pyproject.toml", "[tool.torchdist]\nthis = is = not = toml")
    (project / "pyproject.toml").chmod(0o666)
    write(project.parent / "pyproject.toml", "[tool.torchdist]\nranks = 4\n")
    options = defaults.options("--grace 9", project)
    assert (options.ranks, options.grace) == (4, 9.0)
    assert "is ignored, because other users can write to it" in options.ignored[0]


def test_what_is_no_file_or_cannot_be_read_sets_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(project / "torchdist.toml")
    (project / "pyproject.toml").mkdir()
    (project.parent / "pyproject.toml").symlink_to("/dev/zero")
    assert defaults.load(project) == Options()
    write(project.parents[1] / "pyproject.toml", "[tool.torchdist]\nranks = 4\n")
    refuse = PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(refuse))
    assert defaults.load(project) == Options()


@pytest.mark.parametrize("text", ["tool = 3\n# torchdist\n", "[[tool]]\ntorchdist = 1\n", "[torchdist]\n"])
def test_a_project_with_other_tables(project: Path, text: str) -> None:
    write(project / "pyproject.toml", text)
    assert defaults.load(project) == Options()


def test_a_file_that_is_nested_too_deep_names_itself(project: Path) -> None:
    path = project / "torchdist.toml"
    write(path, f"ranks = {'[' * 5000}{']' * 5000}\n")
    with pytest.raises(OptionError, match="cannot be read") as caught:
        defaults.load(project)
    assert str(path) in caught.value.message
