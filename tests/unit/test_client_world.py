"""What goes with a job to the ranks of this machine, and how options are given from Python."""

from __future__ import annotations

import os
import resource
import sys
import types
from dataclasses import replace
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path

import pytest

from jupyter_torchdist.client import leases, world
from jupyter_torchdist.functions.decorated import distributed
from jupyter_torchdist.functions.keywords import options_of
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.plan import NodePlan
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.world import World
from jupyter_torchdist.store import jobdir
from jupyter_torchdist.store.blobs import BlobStore
from jupyter_torchdist.testing import FakeJob, a_manifest, a_plan, a_spec


def test_the_world_is_this_process_with_what_env_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_NOTEBOOK", "a \udc80")
    monkeypatch.setattr(sys, "path", ["", "relative", "/absolute", "/some.zip"])
    here = world.world_here(Options(ranks=2, env=("NEW=1=2", "OF_THE_NOTEBOOK")), Path("/the/cwd"))
    assert World.from_json(codec.loads(codec.dumps(here.to_json()))) == here
    assert here.environ == {**os.environ, "NEW": "1=2"}
    assert here.sys_path[:4] == ("/the/cwd", "/the/cwd/relative", "/absolute", "/some.zip")
    assert here.python == sys.executable
    assert here.rlimits["RLIMIT_NOFILE"] == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert "NEW" not in os.environ


def test_extension_modules_that_sys_path_does_not_lead_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("/cache/magic.so", "/site/sklearn/utility.so"):
        module = types.ModuleType(Path(file).stem)
        module.__spec__ = ModuleSpec(module.__name__, ExtensionFileLoader(module.__name__, file), origin=file)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = sys.path[:]
    monkeypatch.setattr(sys, "path", [*before, "/site"])
    assert world.sys_path(Path("/the/cwd"))[len(before) :] == ["/site", "/cache"]


def test_libraries_that_a_warm_process_may_import(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("scipy", "scipy.stats", "scipy.stats._stats", "scipy._lib", "scipyx", "sklearn.svm", "transformers")
    for name in [name for name in sys.modules if name.startswith(("scipy", "sklearn", "pandas"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert world.libraries() == ("scipy", "scipy.stats", "sklearn.svm")


def test_a_variable_that_is_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    with pytest.raises(OptionError, match="NOT_SET_ANYWHERE") as caught:
        world.chosen_variables(Options(env=("NOT_SET_ANYWHERE",)))
    assert "--env NOT_SET_ANYWHERE=VALUE" in caught.value.hint


def test_the_mask_is_read_and_not_changed() -> None:
    before = os.umask(0o027)
    try:
        assert world.umask() == 0o027
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_options_from_keywords() -> None:
    assert options_of(ranks=2, fresh=True, background=False, name=None, out=["a", "b"], timeout=90) == Options(
        ranks=2, fresh=True, out=("a", "b"), timeout=90.0
    )
    assert options_of(env={"SEED": 1}, exclude=["a", "b"], numa_binding="node") == Options(
        env=("SEED=1",), exclude=("a", "b"), numa_binding="node"
    )
    assert options_of(name="my run = 2", env="A").name == "my run = 2"


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"rank": 2}, "--ranks"),
        ({"ranks": 0}, "at least 1"),
        ({"ranks": "x"}, "a whole number"),
        ({"collect": "al"}, "did you mean all"),
        ({"gpus": 1, "ranks": 1}, "--gpus and --ranks cannot be used together"),
    ],
)
def test_wrong_keywords_are_refused_where_they_stand(chosen: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        distributed(**chosen)
    assert words in str(caught.value)


def test_a_decorated_function_is_still_the_function() -> None:
    @distributed(ranks=2)
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert double.options == Options(ranks=2, collect="all")


def test_the_gpus_of_running_jobs_are_held(home: Path) -> None:
    place = Home(home)
    spec = a_spec(options=Options(gpus=2))
    plan = replace(a_plan(spec), world_size=2, nodes=(NodePlan("node0", (0, 1), ("GPU-a", "GPU-b")),))
    paths = jobdir.create_job(place, spec, plan, a_manifest(BlobStore(place), spec.job))
    FakeJob(place).running().close()
    with FakeJob.of(paths) as fake:
        fake.rank(0).started()
        held = leases.holders(place)
        assert [(holder.paths, holder.gpus, holder.pids) for holder in held] == [
            (paths, frozenset({"GPU-a", "GPU-b"}), frozenset({4000}))
        ]
        fake.ended()
    assert leases.holders(place) == []


def test_one_kernel_chooses_at_a_time(home: Path) -> None:
    import fcntl

    from jupyter_torchdist.protocol.paths import runtime_dir

    with leases.choosing(), open(runtime_dir() / "choosing.lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with leases.choosing():
        pass


def test_a_strategy_from_keywords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("distributed_type: FSDP\nfsdp_offload_params: true\n")
    options = options_of(ranks=4, config="c.yaml", strategy="fsdp+tp", option={"tp": 2}, compile=True)
    assert (options.strategy, options.compile, options.ranks) == ("fsdp+tp", True, 4)
    assert options.option == ("cpu_offload=True", "tp=2")
