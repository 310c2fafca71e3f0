"""What ``--env-sync`` installs on a host, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_torchdist import capture
from jupyter_torchdist.client import Request
from jupyter_torchdist.client.submit import prepare
from jupyter_torchdist.driver.wheels import Getting
from jupyter_torchdist.node.shipping import environments
from jupyter_torchdist.planning.software import after_sync, compare, wanted
from jupyter_torchdist.protocol.bundle import Package
from jupyter_torchdist.protocol.errors import LaunchError, OptionError, ResourceError
from jupyter_torchdist.protocol.machine.packages import platform, platforms
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.plan import Inventory, Software, Wanted
from tests import wheels

HERE = {"einops": "0.8.1", "numpy": "2.3.1", "torch": "2.13.0+cpu", "nvidia-cublas-cu12": "12.8", "triton": "3.7"}
FITS = "manylinux_2_17_x86_64"


def host(versions: dict[str, str], torch: str = "2.13.0+cu130") -> Inventory:
    software = Software({"torch": torch, **versions}, ("torch",))
    return Inventory(
        "gpu1", 8, 2**36, python="3.10.4", torch=torch, software=software, platform="manylinux_2_36_x86_64"
    )


def test_what_differs_is_installed() -> None:
    found = wanted(HERE, host({"numpy": "1.26.4", "einops": "0.8.1"}))
    assert found is not None and found.pins == ("numpy==2.3.1",)
    assert (found.release, found.platform, found.present["numpy"]) == ("3.10.4", "manylinux_2_36_x86_64", "1.26.4")


def test_another_torch_is_installed_and_brings_its_libraries() -> None:
    found = wanted(HERE, host({}, torch="2.12.0+cu126"))
    assert found is not None and found.pins == ("einops==0.8.1", "numpy==2.3.1", "torch==2.13.0")
    assert after_sync(HERE, host({}, torch="2.12.0+cu126")).torch == "2.13.0"


def test_nothing_is_lacked_afterwards_but_what_cannot_be_got() -> None:
    needs = [Package("einops", "einops", "0.8.1", "line 1", certain=True)]
    with pytest.raises(ResourceError, match="lacks einops"):
        compare(needs, "3.10.4", "2.13.0", [host({})])
    assert not compare(needs, "3.10.4", "2.13.0", [after_sync(HERE, host({}))])


def test_a_job_of_this_machine_has_no_hosts(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--env-sync installs packages on hosts"):
        prepare(Request("1", options=parse_options("--ranks 1 --env-sync"), cwd=tmp_path))


def test_platforms_whose_wheels_run_on_a_host() -> None:
    assert platforms("manylinux_2_6_x86_64")[:2] == ["manylinux_2_6_x86_64", "manylinux_2_5_x86_64"]
    assert "manylinux2014_aarch64" in platforms("manylinux_2_36_aarch64")
    assert platforms("linux_x86_64") == ["linux_x86_64"]
    assert platform().partition("_")[0] in ("manylinux", "linux", "macosx")


def test_what_only_this_machine_has_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, url in (("edited", '{"url": "file:///src", "dir_info": {"editable": true}}'), ("plain_one", "")):
        wheels.install(tmp_path, wheels.wheel(tmp_path, name, "1", {f"{name}.py": ""}))
        if url:
            (tmp_path / f"{name}-1.dist-info/direct_url.json").write_text(url)
    found = capture.installed()
    assert found["plain-one"] == "1" and "edited" not in found
    assert not [name for name in found if name.startswith(("jupyter", "pip"))]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels.installer(folder)
    for name, value in (("PIP_CONFIG_FILE", "/dev/null"), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder))):
        monkeypatch.setenv(name, value)
    return folder


def got(place: Path, *pins: str, present: dict[str, str] | None = None, needed: tuple[str, ...] = ()) -> Getting:
    found = Getting(Wanted(pins, present or {}, "3.10.4", FITS), place, frozenset(needed), "gpu1")
    if found.is_alive():
        found.join()
    return found


def test_needs_are_those_of_the_host(index: Path, tmp_path: Path) -> None:
    """What a marker says counts on the host: on another Python, another system, with what the host has already."""
    needs = (
        'Requires-Dist: older; python_version < "3.11"\nRequires-Dist: windows; sys_platform == "win32"\n'
        'Requires-Dist: machine; platform_machine == "x86_64"\nRequires-Dist: extra; extra == "all"\n'
        "Requires-Dist: there>=2\nRequires-Dist: too_old>=2\nRequires-Dist: pinned<5\n"
    )
    wheels.wheel(index, "top", "1", {}, needs=needs)
    for name, version in (("older", "1"), ("machine", "1"), ("too_old", "3"), ("pinned", "7")):
        wheels.wheel(index, name, version, {})
    found = got(tmp_path / "w" / "key", "top==1", "pinned==7", present={"there": "2.1", "too-old": "1.0"})
    assert found.error is None and found.found is not None
    names = {name.partition("-")[0] for name in found.found.files}
    assert names == {"top", "older", "machine", "too_old", "pinned", "pip"}
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["key"]


def test_what_was_got_is_kept_and_asked_for_no_more(index: Path, tmp_path: Path) -> None:
    wheels.wheel(index, "top", "1", {}, tag="cp310-cp310-manylinux_2_17_x86_64")
    first = got(tmp_path / "w" / "key", "top==1", "none_such==1")
    assert first.found is not None and first.found.left == ("none_such==1",)
    for file in index.iterdir():
        file.unlink()
    again = got(tmp_path / "w" / "key", "top==1", "none_such==1")
    assert again.found == first.found
    name, digest = next((name, one) for name, one in first.found.files.items() if name.startswith("top"))
    assert again.path(digest) == tmp_path / "w" / "key" / name and again.path("0" * 64) is None
    with pytest.raises(
        LaunchError, match=r"none_such==1, which the cell needs, has no wheel for gpu1 \(Python 3.10, many"
    ):
        got(tmp_path / "w" / "key", "top==1", "none_such==1", needed=("none-such",))


def test_an_index_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the port."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_RETRIES", "1")
    found = got(tmp_path / "w" / "key", "top==1")
    assert isinstance(found.error, LaunchError) and "no package index can be reached" in found.error.message
    assert not list((tmp_path / "w").iterdir())


def test_old_environments_go(tmp_path: Path) -> None:

    for name in ("old", "needed", "new"):
        (tmp_path / "envs" / name / "bin").mkdir(parents=True)
        (tmp_path / "envs" / name / environments.MARK).write_text("100")
        if name != "new":
            os.utime(tmp_path / "envs" / name / environments.MARK, (0, 0))
    (tmp_path / "jobs" / "j").mkdir(parents=True)
    (tmp_path / "jobs" / "j" / "environment").write_text("needed")
    assert environments.kept(tmp_path) == (3, 300)
    environments.sweep(tmp_path)
    assert sorted(path.name for path in (tmp_path / "envs").iterdir()) == ["needed", "new"]
