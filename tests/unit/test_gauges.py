"""From a look at ranks to a job's file and what readers make of it. GPUs are those of a library of the test's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.node.gauges import Board, GaugeWatch, Look, Subject
from jupyter_torchdist.node.nodejob import NodeJob
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.gauges import Gauges, Traffic, rounded
from jupyter_torchdist.protocol.machine.interfaces import Interfaces
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.plan import NodePlan
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.server.listing import Listing
from jupyter_torchdist.store import gauges as files
from jupyter_torchdist.store.files import publish_json
from jupyter_torchdist.testing import FakeJob
from tests.leaks import wait_until
from tests.nvml import compiled

GIB = 2**30


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    with FakeJob(Home(tmp_path / "home"), ranks=2) as job:
        yield job


# -- the record


def test_numbers_are_as_exact_as_anyone_reads_them() -> None:
    assert [rounded(value, 3) for value in (0, 7, 999, 1234, 1_234_567.8)] == [0, 7, 999, 1230, 1_230_000]
    assert [rounded(value, 2) for value in (0.4, 99.6, 154.0)] == [0, 100, 150]


def test_the_highest_is_kept_even_when_less_is_known_later() -> None:
    high = Gauges(50, 300, gpu_memory=7, gpu_total=10).after(None)
    low = Gauges(10, 200).after(high)
    assert (low.memory, low.memory_peak, low.gpu_memory, low.gpu_memory_peak) == (200, 300, None, 7)
    assert Gauges(10, 400).after(low).memory_peak == 400


def test_what_the_whole_gpu_held_is_no_ranks_highest() -> None:
    of_all = Gauges(gpu_memory=70, gpu_shared=True).after(None)
    assert of_all.gpu_memory_peak == 70
    unknown = Gauges().after(of_all)
    assert (unknown.gpu_memory_peak, unknown.gpu_shared) == (70, True)
    own = Gauges(gpu_memory=20).after(unknown)
    assert (own.gpu_memory_peak, own.gpu_shared) == (20, False)


@pytest.mark.parametrize("value", [None, [], "x", {"cpu": "high", "memory": -1, "gpu": True, "gpu_total": 2**60}])
def test_nothing_is_known_of_what_is_malformed(value: Any) -> None:
    assert Gauges.from_json(value) == Gauges()


# -- GPUs


Ask = Callable[[str], Gauges]
Machine = Callable[..., Ask]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Looks at this process as a rank with this or that GPU, of a machine whose NVML is compiled so."""
    look = Look()
    clock = [0.0]

    def machine(**defines: int) -> Ask:
        monkeypatch.setenv("TORCHDIST_NVML", str(compiled(tmp_path, PROCESSES=0, USE=87, **defines)))
        return ask

    def ask(gpu: str) -> Gauges:
        me = Subject("j", 0, ProcessId.mine(), gpu)
        clock[0] += 2.0
        return look.at([me], clock[0])[me].gauges

    yield machine
    look.close()


def test_a_gpu_and_what_the_rank_holds_on_it(machine: Machine) -> None:
    found = machine(PID=os.getpid())("GPU-101")
    assert (found.gpu, found.gpu_memory, found.gpu_shared) == (87, rounded(2 * GIB, 3), False)
    assert found.gpu_total == rounded(80 * GIB, 3)
    assert (found.memory or 0) > 10_000_000
    assert (found.gpu_clock, found.gpu_temperature) == (None, None), "this library does not tell"


def test_its_clock_and_temperature(machine: Machine) -> None:
    found = machine(CLOCK=1980)("GPU-101")
    assert (found.gpu_clock, found.gpu_temperature) == (1981, 71), "of the multiprocessors, of the chip"


@pytest.mark.parametrize(
    ("bits", "words"),
    [(0x1, ""), (0x22, "heat"), (0x44, "heat, its power limit"), (0x88, "the power supply"), (0x100, "")],
)
def test_what_slows_it(machine: Machine, bits: int, words: str) -> None:
    assert machine(SLOWED=bits)("GPU-101").gpu_slowed == words


def test_errors_count_from_the_first_look_at_the_rank(machine: Machine) -> None:
    ask = machine(ERRORS=2)
    assert [ask("GPU-101").gpu_errors for _ in range(3)] == [0, 2, 4]


def test_what_goes_over_its_nvlinks(machine: Machine) -> None:
    ask = machine(LINKS=1_000_000)
    assert (ask("GPU-101").nvlink_received, ask("GPU-101").nvlink_errors) == (None, 1)
    found = ask("GPU-101")
    assert (found.nvlink_received, found.nvlink_sent) == (rounded(512e6, 2), rounded(1024e6, 2)), "KiB in two seconds"
    assert found.nvlink_errors == 2, "one of the two counters is not there"


def test_an_error_that_the_driver_reports_stays_known(machine: Machine) -> None:
    ask = machine(XID=79)
    first, second = ask("GPU-101"), ask("GPU-101")
    assert [first.gpu_xid, second.gpu_xid] == [79, None]
    assert second.after(first).gpu_xid == 79
    assert first.gpu_slowed == "", "this library does not tell"


def test_where_processes_are_not_told_the_whole_gpu_is(machine: Machine) -> None:
    found = machine(PID=4711)("GPU-101")
    assert (found.gpu_memory, found.gpu_shared) == (rounded(3 * GIB, 3), True)


def test_a_rank_that_was_told_apart_holds_nothing_once_it_is_gone_from_the_gpu(machine: Machine) -> None:
    ask = machine(PID=os.getpid())
    assert ask("GPU-102").gpu_shared  # it is not there yet
    assert ask("GPU-101").gpu_memory == rounded(2 * GIB, 3)
    assert ask("GPU-102").gpu_memory == 0


def test_memory_that_nvml_does_not_give_for_a_process(machine: Machine) -> None:
    """NVML_VALUE_NOT_AVAILABLE is no number of bytes."""
    found = machine(PID=os.getpid(), HELD=-1)("GPU-101")
    assert (found.gpu_memory, found.gpu_shared) == (rounded(3 * GIB, 3), True)


def test_an_instance_of_a_divided_gpu_has_memory_and_no_use(machine: Machine) -> None:
    found = machine(MIG=101)("MIG-1010")
    assert (found.gpu, found.gpu_memory) == (None, rounded(3 * GIB, 3))


@pytest.mark.parametrize("defines", [{"BROKEN": 1}, {"COUNT": 1}, {"INIT": 9}])
def test_a_gpu_that_does_not_answer_costs_its_own_numbers_alone(machine: Machine, defines: dict[str, int]) -> None:
    found = machine(**defines)("GPU-101")
    assert (found.gpu, found.gpu_memory, found.gpu_total) == (None, None, None)
    assert found.memory


# -- the network

HEAD = "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"
AROUND = " 1 0 0 0 0 0 0 "


class Wires:
    """The kernel's files for two interfaces and one InfiniBand port, written by hand."""

    def __init__(self, directory: Path) -> None:
        self._devices, self._ports = directory / "dev", directory / "infiniband"
        self.interfaces = Interfaces(self._devices, self._ports)

    def at(self, now: float, words: int = 0, **moved: tuple[int, int]) -> dict[str, Traffic]:
        """A look at ``now``. ``moved``: bytes received and sent since the machine's start; ``words`` of the port."""
        lines = [
            f"{name:>6}: {into}{AROUND}{out}{AROUND}0" for name, (into, out) in {"lo": (9**9, 9**9), **moved}.items()
        ]
        self._devices.write_text(HEAD + "\n".join(lines) + "\n")
        counters = self._ports / "mlx5_0" / "ports" / "1" / "counters"
        counters.mkdir(parents=True, exist_ok=True)
        for way in ("rcv", "xmit"):
            (counters / f"port_{way}_data").write_text(f"{words}\n")
        return self.interfaces.look(now)


def test_what_goes_over_the_interfaces_that_are_busy(tmp_path: Path) -> None:
    wires = Wires(tmp_path)
    assert wires.at(10.0, eth0=(1000, 0), docker0=(5, 5)) == {}, "one look tells no rate"
    assert wires.at(12.0, eth0=(2_469_000, 500), docker0=(5, 5)) == {"eth0": Traffic(1_200_000, 250)}
    assert wires.at(14.0, eth0=(2_469_000, 500), docker0=(5, 5)) == {"eth0": Traffic(0, 0)}, "it was busy"
    assert wires.at(16.0, eth0=(3, 3), docker0=(5, 5), new0=(9**9, 0)) == {"eth0": Traffic(0, 0)}, "a reset"


def test_an_infiniband_port_counts_words_of_four_bytes(tmp_path: Path) -> None:
    wires = Wires(tmp_path)
    wires.at(1.0)
    assert wires.at(2.0, words=1_000_000) == {"mlx5_0:1": Traffic(4_000_000, 4_000_000)}


@pytest.mark.parametrize("text", ["", "a\nb\n", HEAD + "eth0: x 1\n", HEAD + "eth0\n", HEAD + "\0: 1\n"])
def test_counters_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "dev").write_text(text)
    interfaces = Interfaces(tmp_path / "dev", tmp_path / "none")
    assert [interfaces.look(now) for now in (1.0, 2.0)] == [{}, {}]
    assert Interfaces(tmp_path / "missing").look(1.0) == {}


def test_the_counters_of_this_machine(tmp_path: Path) -> None:
    interfaces = Interfaces()
    interfaces.look(1.0)
    assert "lo" not in interfaces.look(2.0)


def test_the_traffic_is_in_the_nodes_file_and_told(job: FakeJob) -> None:
    job.takes(rank0=Gauges(10, 500))
    board = Board(job.paths, "node0")
    board.write({0: Gauges(10, 500)}, {"eth0": Traffic(5, 7)})
    reader = files.GaugeFiles(job.paths)
    reader.look()
    assert (reader.latest, reader.network) == ({0: Gauges(10, 500, 500)}, {"node0": {"eth0": Traffic(5, 7)}})
    before = job.paths.node("node0").gauges.stat().st_ino
    board.write({0: Gauges(10, 500)}, {"eth0": Traffic(5, 7)})
    assert job.paths.node("node0").gauges.stat().st_ino == before
    board.write({0: Gauges(10, 500)}, {})
    reader.look()
    assert reader.network == {"node0": {}}
    Board(job.paths, "node0").write({0: Gauges(9, 400)})
    assert files.read(job.paths)[0].memory_peak == 500, "the next agent reads the file, too"


@pytest.mark.parametrize(
    "value",
    [None, [], {"eth0": 7}, {"eth0": {"received": 1}}, {"eth0": {"received": -1, "sent": 2**60}}, {"x" * 99: {}}],
)
def test_traffic_that_is_malformed(value: Any) -> None:
    assert Traffic.of_host(value) == {}


# -- the agent's side


def a_node_job(paths: JobPaths) -> NodeJob:
    job = NodeJob(paths, "node0", (0, 1))
    job.processes = {0: ProcessId.mine(), 1: replace(ProcessId.mine(), ticks=1)}  # rank 1 is gone
    return job


def test_ranks_that_live_are_written_and_after_the_end_nothing(job: FakeJob) -> None:
    watch, node = GaugeWatch(), a_node_job(job.paths)
    path = node.files.gauges
    begun = time.monotonic()

    def turn() -> bool:
        watch.turn({"j": node}, time.monotonic() + 10)
        return path.exists()

    try:
        assert wait_until(turn)
        (first,) = files.read(job.paths).items()
        assert first[0] == 0
        assert first[1].memory
        node.state = "ended"
        path.unlink()
        for _ in range(3):
            watch.turn({"j": node}, begun + 1000)
            watch.turn({}, begun + 2000)
        assert sorted(entry.name for entry in node.files.root.iterdir()) == [
            "agent.events",
            "launcher.log",
            "profile-requests",
        ]
    finally:
        watch.close()
        node.close()


def test_what_is_found_after_the_end_is_not_written(job: FakeJob) -> None:
    """The directory may be on its way out: a file made now would be left behind."""
    watch, node = GaugeWatch(), a_node_job(job.paths)
    try:
        watch.turn({"j": node}, time.monotonic())
        node.state = "ended"
        assert wait_until(lambda: not watch._found.empty())
        watch.turn({"j": node}, time.monotonic())
        assert not node.files.gauges.exists()
    finally:
        watch.close()
        node.close()


def test_a_thread_that_fails_is_asked_again(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def at(self: Look, subjects: list[Subject], now: float) -> dict[Subject, Gauges]:
        looked.append(now)
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Look, "at", at)
    watch, node = GaugeWatch(), a_node_job(job.paths)

    def turn() -> bool:
        watch.turn({"j": node}, time.monotonic() + 10 * len(looked))
        return len(looked) > 2

    try:
        assert wait_until(turn)
    finally:
        watch.close()
        node.close()


def test_the_next_agent_keeps_the_highest(job: FakeJob) -> None:
    job.takes(rank0=Gauges(10, 500, 900), rank1=Gauges(10, 100, 100))
    Board(job.paths, "node0").write({0: Gauges(20, 600)})
    found = files.read(job.paths)
    assert found[0] == Gauges(20, 600, 900)
    assert found[1] == Gauges(10, 100, 100)


def test_what_did_not_change_is_not_written(job: FakeJob) -> None:
    job.takes(rank0=Gauges(10, 500, 900))
    board = Board(job.paths, "node0")
    path = job.paths.node("node0").gauges
    before = path.stat().st_ino
    board.write({0: Gauges(10, 500)})
    assert path.stat().st_ino == before
    board.write({0: Gauges(11, 500)})
    assert path.stat().st_ino != before


def test_a_directory_that_is_gone_or_a_file_that_is_damaged(job: FakeJob) -> None:
    board = Board(job.paths, "node0")
    board.write({0: Gauges(10, 500)})
    assert not job.paths.node("node0").root.exists()
    job.takes()
    job.paths.node("node0").gauges.write_bytes(b"\xff{")
    job.paths.plan.write_bytes(b"[]")
    board = Board(job.paths, "node0")
    assert board.gpus == {}
    board.write({0: Gauges(10, 500)})
    assert files.read(job.paths)[0].memory == 500
    assert [path.name for path in job.paths.node("node0").root.iterdir()] == ["gauges.json"]


# -- readers


def test_only_what_was_replaced_is_read_again(tmp_path: Path) -> None:
    with FakeJob(Home(tmp_path / "home"), ranks=4, nodes=2) as job:
        job.takes(rank0=Gauges(1), rank2=Gauges(2))
        reader = files.GaugeFiles(job.paths)
        reader.look()
        latest = reader.latest
        assert latest == {0: Gauges(1), 2: Gauges(2)}
        reader.look()
        assert reader.latest is latest
        job.takes(rank0=Gauges(1), rank3=Gauges(3))
        reader.look()
        assert reader.latest == {0: Gauges(1), 3: Gauges(3)}


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"0": 7, "x": {}}', b"[" * 100_000, b"\xff"])
def test_a_file_that_user_code_wrote(job: FakeJob, data: bytes) -> None:
    job.takes()
    job.paths.node("node0").gauges.write_bytes(data)
    assert set(files.read(job.paths).values()) <= {Gauges()}


def test_a_job_of_an_earlier_version(job: FakeJob) -> None:
    assert files.read(job.paths) == {}


def test_the_memory_of_a_jobs_gpus() -> None:
    own, of_all = Gauges(gpu_memory=10, gpu_total=80), Gauges(gpu_memory=30, gpu_total=80, gpu_shared=True)
    two = {0: "a", 1: "b"}
    assert files.of_gpus({0: own, 1: own}, two) == (20, 160)
    assert files.of_gpus({0: own, 1: own}, {0: "a", 1: "a"}) == (20, 80)
    assert files.of_gpus({0: of_all, 1: of_all}, {0: "a", 1: "a"}) == (30, 80)
    assert files.of_gpus({0: own}, two) == (10, 80)
    assert files.of_gpus({0: Gauges(1, 2)}, two) is None
    assert files.of_gpus({0: own}, {}) is None


def test_the_panels_row(tmp_path: Path) -> None:
    with FakeJob(Home(tmp_path / "home"), ranks=2) as job:
        plan = replace(job.plan, nodes=(NodePlan("node0", (0, 1), ("GPU-1", "GPU-2")),))
        publish_json(job.paths.plan, plan.to_json())
        listing = Listing(job.home)
        job.running()
        assert listing.rows()[0]["gpu_memory"] is None
        job.takes(rank0=Gauges(gpu_memory=10, gpu_total=80), rank1=Gauges(gpu_memory=20, gpu_total=80))
        assert listing.rows()[0]["gpu_memory"] == (30, 160)
        job.ended()
        assert listing.rows()[0]["gpu_memory"] is None


def test_the_json_form_is_the_record(job: FakeJob) -> None:
    told = Gauges(1, 2, 3, 4, 5, 6, 7, True)
    assert Gauges.from_json(codec.loads(codec.dumps(told.to_json()))) == told
