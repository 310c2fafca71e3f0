"""From a request to a job through the fake driver: real capture, real bundle, real files, ranks one after another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import jupyter_torchdist as td
from jupyter_torchdist.client import Job, Request, leases, prepare, rerun, start_notes, submit
from jupyter_torchdist.client import job as job_module
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.local import LocalLauncher
from jupyter_torchdist.protocol.errors import (
    CaptureError,
    CellSyntaxError,
    DamagedJob,
    JobNotFound,
    LaunchError,
    OptionError,
    ResourceError,
    StoreError,
    UndefinedName,
)
from jupyter_torchdist.protocol.machine.inventory import local_inventory
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.plan import Gpu, Inventory, Limits
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import catalog, files
from jupyter_torchdist.testing import FakeJob

submitting: Any = import_module("jupyter_torchdist.client.submit")  # the package has a function of that name
ODD = "class Odd(Exception):\n    def __init__(self, a, b):\n        super().__init__(a)\n        self.b = b"
TWO = Options(ranks=2)


@pytest.fixture
def pool(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverPool]:
    pool = DriverPool(("-m", "jupyter_torchdist.testing"))
    monkeypatch.setattr(job_module, "default_pool", lambda: pool)
    monkeypatch.setattr(submitting, "default_pool", lambda: pool)
    yield pool
    pool.close()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a notebook: ``__main__`` of this process for the length of the test."""
    import types

    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main.__dict__


def cell(source: str, namespace: dict[str, Any] | None = None, options: Options = TWO) -> Request:
    return Request(source, "Cell In[3]", 2, options, namespace or {})


def nothing_left(home: Path) -> bool:
    jobs = Home(home).jobs
    return not jobs.exists() or list(jobs.iterdir()) == []


def test_a_cell_goes_out_and_its_values_come_back(pool: DriverPool, notebook: dict[str, Any]) -> None:
    exec("losses = [3.0]\ndef half(x):\n    return x / 2", notebook)
    losses = notebook["losses"]
    source = "import os\nlosses.append(half(losses[-1]))\nrank = os.environ['RANK']\nprint('rank', rank)\nlen(losses)\n"
    job = submit(cell(source, notebook))
    assert job.wait(60).state == "succeeded"
    assert job.logs() == "[rank 0] rank 0\n[rank 1] rank 1\n"
    assert job.value == 2
    assert set(job.bring(notebook).names) >= {"rank", "losses"}
    assert notebook["losses"] is losses
    assert losses == [3.0, 1.5]
    assert notebook["rank"] == "0"
    assert job.memo is None  # the notebook's objects are not kept alive by a job that is done with them
    assert {item.name for item in job.receipt} >= {"losses", "half"}


def test_a_job_is_attached_and_brought_by_another_owner(pool: DriverPool, notebook: dict[str, Any]) -> None:
    notebook["weights"] = [1, 2]
    submit(cell("weights.append(3)\nx = 1\n", notebook, Options(ranks=1, name="mine"))).wait(60)
    namespace: dict[str, Any] = {}
    td.attach("mine").bring(namespace)
    assert namespace == {"weights": [1, 2, 3], "x": 1}
    assert notebook["weights"] == [1, 2]


def test_a_failing_rank_raises_here(pool: DriverPool, notebook: dict[str, Any]) -> None:
    exec(ODD, notebook)
    source = "import os\nif os.environ['RANK'] == '1':\n    raise Odd('text', 5)\n"
    job = submit(cell(source, notebook, Options(ranks=3)))
    job.wait(60)
    with pytest.raises(notebook["Odd"], match="text") as caught:
        job.raise_for_state()
    assert caught.value.b == 5
    assert job.state.first_failure == 1


def test_nothing_runs_and_nothing_is_written_for_a_plan(home: Path, notebook: dict[str, Any]) -> None:
    notebook["lr"] = 0.1
    prepared = prepare(cell("print(lr)\n", notebook))
    assert (prepared.plan.world_size, prepared.plan.backend) == (2, "gloo")
    assert [item.name for item in prepared.capture.receipt] == ["lr"]
    assert not home.exists()


def test_a_directory_for_checkpoints_is_the_cells_own(home: Path, tmp_path: Path) -> None:
    """A rerun comes from another directory and means the same one."""
    for given, meant in (("ckpt", str(tmp_path / "ckpt")), ("/elsewhere", "/elsewhere")):
        options = Options(ranks=2, strategy="ddp", checkpoint=given)
        prepared = prepare(replace(cell("pass\n", options=options), cwd=tmp_path))
        assert prepared.plan.strategy.checkpoint == prepared.spec.options.checkpoint == meant


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (cell("print(undefined_name)\n"), UndefinedName, "undefined_name"),
        (cell("x = 1\nif True\n    pass\n"), CellSyntaxError, ""),
        (cell("print(g)\n", {"g": (x for x in "ab")}), CaptureError, "g"),
        (cell("pass\n", options=Options(gpus=8)), ResourceError, "--ranks 8"),
        (cell("pass\n", options=Options(ranks=100_000)), ResourceError, "ask for at most"),
        (cell("pass\n", options=Options(ranks=1, env=("NOT_SET_HERE",))), OptionError, "NOT_SET_HERE"),
    ],
)
def test_what_cannot_run_starts_and_writes_nothing(
    home: Path, pool: DriverPool, monkeypatch: pytest.MonkeyPatch, request_: Request, error: type[Exception], words: str
) -> None:
    monkeypatch.setattr(LocalLauncher, "probe", lambda launcher, hosts, environ: (Inventory("h", 2, 2**33),))
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(error) as caught:
        submit(request_)
    assert words in str(caught.value)
    assert not home.exists()
    assert pool.zygote is None


def test_a_full_disk_starts_nothing(home: Path, pool: DriverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_space", lambda directory: 0)
    with pytest.raises(StoreError, match=r"3\.0 MB needed"):
        submit(cell("len(data)\n", {"data": bytes(3_000_000)}))
    assert nothing_left(home)
    assert pool.zygote is None


def test_a_driver_that_dies_leaves_no_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DriverPool(
        ("-c", "from jupyter_torchdist.driver import zygote as z; z.serve(z.forking(lambda line: exit('no sockets')))")
    )
    with pytest.raises(LaunchError) as caught:
        submit(cell("pass\n"), pool=pool)
    pool.close()
    assert "no sockets" in caught.value.hint
    assert nothing_left(home)


def test_an_interrupt_while_handing_over_asks_the_driver_to_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(DriverPool):
        def hand(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit(cell("pass\n"), pool=Interrupted())
    (job,) = catalog.jobs()
    assert len(list(Home(home).job(job.job).requests.iterdir())) == 1


def test_running_again_is_a_new_job_with_the_same_bundle(home: Path, pool: DriverPool) -> None:
    first = submit(cell("y = x + 1\n", {"x": 41}))
    first.wait(60)
    blobs = sorted(Home(home).blobs.iterdir())
    for which in (first.id, first):
        again = rerun(which)
        assert again.wait(60).state == "succeeded"
        assert again.id != first.id
        assert again.result()["y"] == 42
    assert sorted(Home(home).blobs.iterdir()) == blobs
    Home(home).blob(first.manifest.stream.digest).write_bytes(b"flipped")
    with pytest.raises(DamagedJob):
        rerun(first.id)
    with pytest.raises(JobNotFound):
        rerun("nothing")


def test_running_again_with_another_variable(home: Path, pool: DriverPool) -> None:
    """Values of the environment are not stored: what the first job was given has to be given again."""
    source = "import os\ny = os.environ['TD_ONE'], os.environ.get('TD_TWO')\n"
    first = submit(Request(source=source, options=replace(TWO, env=("TD_ONE=1",))))
    assert first.wait(60).state == "succeeded"
    again = rerun(first, env=("TD_ONE=3", "TD_TWO=2"))
    assert again.wait(60).state == "succeeded"
    assert again.result()["y"] == ("3", "2")
    with pytest.raises(OptionError, match="TD_ONE: there is no such variable here"):
        rerun(first.id, env=("TD_TWO=2",))


def test_unchanged_data_is_not_written_again(home: Path, pool: DriverPool) -> None:
    data = bytearray(2_000_000)
    first = submit(cell("len(data)\n", {"data": data}))
    first.wait(60)
    written = submitting.blob_store(Home(home)).written
    second = submit(cell("len(data)\n", {"data": data}))
    second.wait(60)
    assert submitting.blob_store(Home(home)).written == written
    assert {blob.digest for blob in second.manifest.blobs} == {blob.digest for blob in first.manifest.blobs}


def test_functions_on_ranks(pool: DriverPool, notebook: dict[str, Any]) -> None:
    exec("import os\nscale = 10\ndef f(x, y=0):\n    return scale * x + y + int(os.environ['RANK'])", notebook)
    train = td.distributed(ranks=3)(notebook["f"])
    assert train.distributed(2, y=5) == [25, 26, 27]
    assert td.launch(notebook["f"], (1,), ranks=2) == [10, 11]
    assert td.launch(notebook["f"], (1,), ranks=2, collect="rank0") == [10]
    with pytest.raises(TypeError, match=r"as a tuple: write launch\(f, \(argument,\)\), not int"):
        td.launch(notebook["f"], 1, ranks=2)  # type: ignore[arg-type]
    job = train.submit(1)
    assert job.wait(60).state == "succeeded"
    assert job.spec.label == "f"
    with pytest.raises(TypeError):
        train.distributed()


def test_a_script_runs_as_main_with_its_arguments(home: Path, pool: DriverPool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    program = "import sys\nfrom beside import name\nif __name__ == '__main__':\n    print(name, sys.argv[1:])\n"
    script.write_text(program)
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    job = submit(Request(program, str(script), 1, Options(ranks=1), kind="script", argv=("train.py", "--lr", "1")))
    assert job.wait(60).state == "succeeded", job.exception()
    assert job.logs() == "beside ['--lr', '1']\n"


def test_job_ids_are_safe_and_tell_the_time() -> None:
    ids = {submitting.new_job_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(job) == 22 and Home(Path("/")).job(job).job == job for job in ids)


GPUS = tuple(Gpu(f"GPU-{index}", index, "H200", 2**37, 0) for index in range(2))


def on_gpus(gpus: tuple[Gpu, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLauncher, "probe", lambda launcher, hosts, environ: (Inventory("h", 2, 2**33, gpus),))


def test_a_running_job_keeps_its_gpus_and_replace_takes_them(
    home: Path, pool: DriverPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(GPUS, monkeypatch)
    with FakeJob(Home(home)).running() as earlier:
        plan = earlier.plan.to_json()
        plan["nodes"][0]["gpus"] = ["GPU-0", "GPU-1"]
        files.publish_json(earlier.paths.plan, plan)
        with pytest.raises(ResourceError, match=f"GPU 0 has job {earlier.spec.job}"):
            submit(cell("pass\n", options=Options(gpus=1)))

        def kill(self: Job) -> None:
            assert self.id == earlier.spec.job
            earlier.ended("cancelled")

        monkeypatch.setattr(Job, "kill", kill)
        job = submit(cell("pass\n", options=Options(gpus=2, replace=True)))
        job.wait(60)
    assert job.plan.nodes[0].gpus == ("GPU-0", "GPU-1")
    assert leases.holders(Home(home)) == []


def test_the_gpu_that_only_this_kernel_holds_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    on_gpus((Gpu("GPU-0", 0, "H200", 2**37, 5, (os.getpid(),)),), monkeypatch)
    assert prepare(cell("pass\n", options=Options(gpus=1))).plan.nodes[0].gpus == ("GPU-0",)
    on_gpus((Gpu("GPU-0", 0, "H200", 2**37, 5, (1,)),), monkeypatch)
    with pytest.raises(ResourceError, match="process 1"):
        prepare(cell("pass\n", options=Options(gpus=1)))


def test_what_the_machine_lacks_is_a_note_of_the_first_job(
    home: Path, notebook: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(local_inventory(), limits=Limits(64_000_000, -1, 256, (), False))
    monkeypatch.setattr(LocalLauncher, "probe", lambda self, options, environ: (small,))
    monkeypatch.setattr(start_notes, "_told", set())
    first, second = (prepare(cell("x = 1", notebook), Home(home)) for _ in range(2))
    assert [note.partition(";")[0] for note in first.capture.notes] == [
        f"warning: shared memory of {small.host}: /dev/shm has 0.1 GB",
        f"warning: open files of {small.host}: 256 at most",
    ]
    assert second.capture.notes == ()
