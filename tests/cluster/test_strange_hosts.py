"""A cell on hosts as they are in the world: their shells, users, disks, names, networks and Pythons."""

from __future__ import annotations

import json
import linecache
import os
import re
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.ssh.connection import ssh_words
from jupyter_torchdist.protocol.errors import LaunchError, TorchDistError
from jupyter_torchdist.store import segments
from jupyter_torchdist.store.tail import Tail
from tests.cluster import node_python
from tests.cluster.cells import MEET, PATIENCE, PYTHON, start
from tests.cluster.cluster import Cluster
from tests.lacking import lacking
from tests.leaks import wait_until

ONE = "--hosts node1 --ranks 1"
TWO = "--hosts node1,node2 --ranks 2"

Change = Callable[..., None]


@pytest.fixture
def undo(cluster: Cluster) -> Iterator[ExitStack]:
    """What makes the hosts as they were."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def write(cluster: Cluster, undo: ExitStack) -> Change:
    """Writes a file of a host, for the length of the test."""

    def write(node: str, path: str, text: str) -> None:
        old = cluster.run(node, "cat", path, check=False)
        if old.returncode:
            undo.callback(cluster.run, node, "rm", path)
        else:
            undo.callback(cluster.write, node, path, old.stdout)
        cluster.write(node, path, text)

    return write


@pytest.fixture
def mount(cluster: Cluster, undo: ExitStack) -> Change:
    """Mounts something on node1, for the length of the test."""

    def mount(*words: str) -> None:
        cluster.run("node1", "mount", *words)
        undo.callback(cluster.run, "node1", "umount", "--lazy", words[-1])

    return mount


def succeeds(pool: DriverPool, options: str = ONE, **named: object) -> str:
    """Run the cell; what its ranks printed."""
    job = start(pool, MEET, options, **named)  # type: ignore[arg-type]
    state = job.wait(PATIENCE)
    assert state.state == "succeeded", state.reason
    return job.logs(stream="out")


# ------------------------------------------------------------------------------------------------- shells and users


def test_a_login_that_prints(pool: DriverPool, write: Change) -> None:
    write("node1", "/root/.bashrc", "echo 'Welcome to node1!'; printf 'no newline'; echo trouble >&2\n")
    write("node1", "/root/.profile", "seq 20000; printf '\\0\\377 disk quota: 5 % used'\n")
    assert succeeds(pool) == "rank 0 on node1 sum 0.0\n"


@pytest.mark.parametrize("shell", ["tcsh", pytest.param("fish", marks=pytest.mark.soak)])
def test_a_login_shell_that_is_no_sh(pool: DriverPool, cluster: Cluster, write: Change, shell: str) -> None:
    path = cluster.run("node1", "which", shell, check=False).stdout.strip()
    if not path:
        lacking(f"no {shell} here: make cluster")
    users = cluster.run("node1", "cat", "/etc/passwd").stdout.splitlines(keepends=True)
    write("node1", "/etc/passwd", "".join([f"root:x:0:0:root:/root:{path}\n", *users[1:]]))
    write("node1", "/root/.tcshrc", "echo 'Welcome to tcsh!'\n")
    write("node1", "/root/.config/fish/config.fish", "echo 'Welcome to fish!'\n")
    assert "rank 0 on node1" in succeeds(pool)


def test_an_ordinary_user_with_an_environment_at_home(pool: DriverPool, cluster: Cluster, undo: ExitStack) -> None:
    cluster.run("node1", "ln", "-s", str(node_python.PLACE), "/home/alice/.venv")
    undo.callback(cluster.run, "node1", "rm", "/home/alice/.venv")
    job = start(
        pool,
        "import os, sys\nprint(os.getuid(), os.environ['HOME'], sys.executable)",
        "--hosts alice@node1 --ranks 1",
        python=None,
    )
    assert job.wait(PATIENCE).state == "succeeded"
    assert job.logs(stream="out") == "1717 /home/alice /home/alice/.venv/bin/python\n"


@pytest.mark.soak
def test_a_host_that_wants_a_password(pool: DriverPool, cluster: Cluster, undo: ExitStack, tmp_path: Path) -> None:
    """Nobody is asked in the kernel; a connection that the user opens in a terminal, as the hint says, is used."""
    cluster.run("node1", "useradd", "--create-home", "bob")
    undo.callback(cluster.run, "node1", "userdel", "--force", "--remove", "bob")
    cluster.run("node1", "sh", "-c", "echo bob:secret | chpasswd")
    options = "--hosts bob@node1 --ranks 1"
    with pytest.raises(LaunchError, match=r"bob@node1: .*Permission denied \(password") as caught:
        start(pool, MEET, options)
    command = shlex.split(caught.value.hint.split("`")[3])
    answer = tmp_path / "answer"
    answer.write_text("#!/bin/sh\necho secret\n")
    answer.chmod(0o700)
    environ = {**os.environ, "SSH_ASKPASS": str(answer), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run([command[0], "-o", "BatchMode=no", *command[1:]], env=environ, check=True, timeout=PATIENCE)
    control = command[command.index("-S") + 1]
    undo.callback(subprocess.run, ["ssh", "-S", control, "-O", "exit", "bob@node1"], check=True)
    assert "rank 0 on node1" in succeeds(pool, options)


@pytest.mark.soak
def test_a_host_without_tools_to_copy(pool: DriverPool, cluster: Cluster, mount: Change) -> None:
    for tool in ("tar", "rsync", "scp", "sftp"):
        if path := cluster.run("node1", "which", tool, check=False).stdout.strip():
            mount("--bind", "/dev/null", path)
    job = start(pool, "open('kept.txt', 'w').write('x')\nsize = len(data)", ONE, names={"data": bytes(3_000_000)})
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    names: dict[str, object] = {}
    job.bring(names)
    assert names["size"] == 3_000_000


# ------------------------------------------------------------------------------------------------------------ disks


@pytest.mark.soak
def test_nothing_in_tmp_may_be_executed(pool: DriverPool, mount: Change) -> None:
    mount("-t", "tmpfs", "-o", "noexec,mode=1777", "none", "/tmp")
    assert "rank 0" in succeeds(pool)


def test_a_home_that_is_read_only_and_a_scratch_that_is_not_there_yet(
    pool: DriverPool, cluster: Cluster, mount: Change, undo: ExitStack
) -> None:
    mount("--rbind", "/root", "/root")  # with the Python below
    cluster.run("node1", "mount", "-o", "remount,bind,ro", "/root")
    undo.callback(cluster.run, "node1", "rm", "-rf", "/srv/new")
    job = start(pool, "import os; print(os.getcwd())", f"{ONE} --host-option scratch=/srv/new/scratch")
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert job.logs(stream="out").startswith("/srv/new/scratch/node1/jobs/")


@pytest.mark.soak
def test_a_home_that_is_read_only(pool: DriverPool, cluster: Cluster, mount: Change) -> None:
    mount("--rbind", "/root", "/root")  # with the Python below
    cluster.run("node1", "mount", "-o", "remount,bind,ro", "/root")
    assert "rank 0" in succeeds(pool)


def remove(cluster: Cluster, path: str) -> None:
    """A warm process may still write compiled modules there."""
    assert wait_until(lambda: not cluster.run("node1", "rm", "-rf", path, check=False).returncode, PATIENCE)


@pytest.mark.soak
def test_another_scratch_for_the_next_cell(pool: DriverPool, undo: ExitStack, cluster: Cluster) -> None:
    """The agent still runs, with the scratch of the cell before."""
    for name in ("first", "second"):
        undo.callback(remove, cluster, f"/srv/{name}")
        job = start(pool, "import os; print(os.getcwd())", f"{ONE} --host-option scratch=/srv/{name}")
        assert job.wait(PATIENCE).state == "succeeded", job.state.reason
        assert job.logs(stream="out").startswith(f"/srv/{name}/node1/jobs/")


def test_a_disk_without_room_for_our_code(pool: DriverPool, mount: Change) -> None:
    mount("-t", "tmpfs", "-o", "size=200k", "none", "/mnt")
    with pytest.raises(TorchDistError, match=r"node1 .*No space left") as caught:
        start(pool, MEET, f"{ONE} --host-option scratch=/mnt")
    assert "/mnt" in str(caught.value)


def test_a_disk_without_room_for_the_data(pool: DriverPool, mount: Change) -> None:
    mount("-t", "tmpfs", "-o", "size=8m", "none", "/mnt")
    data = bytes(20_000_000)
    job = start(pool, "len(data)", f"{ONE} --host-option scratch=/mnt", names={"data": data})
    assert job.wait(PATIENCE).state == "failed"
    assert "node1" in job.state.reason
    assert "No space left" in job.state.reason
    assert "/mnt" in job.state.reason


@pytest.mark.soak
def test_a_scratch_in_memory(pool: DriverPool, cluster: Cluster, mount: Change) -> None:
    """Of captured data a quarter of it is kept at most, so the next cell has room, too."""
    mount("-t", "tmpfs", "-o", "size=64m", "none", "/mnt")
    for turn in range(4):
        data = bytes([turn]) * 20_000_000
        job = start(pool, "print(len(data))", f"{ONE} --host-option scratch=/mnt", names={"data": data})
        assert job.wait(PATIENCE).state == "succeeded", job.state.reason
        assert job.logs(stream="out") == "20000000\n"
    used = int(cluster.run("node1", "df", "--output=used", "--block-size=1", "/mnt").stdout.split()[-1])
    assert used < 45_000_000


# ------------------------------------------------------------------------------------------------ network and names


@pytest.mark.soak
def test_a_host_behind_another(pool: DriverPool, cluster: Cluster, undo: ExitStack) -> None:
    text = cluster.ssh_config.read_text()
    undo.callback(cluster.ssh_config.write_text, text)
    cluster.ssh_config.write_text("Host node2\n  ProxyJump node1\n" + text)
    end_connection = [*ssh_words("node2")[:-2], "-O", "exit", "--", "node2"]
    undo.callback(subprocess.run, end_connection, capture_output=True)
    cluster.partition("caller", "node2")
    assert "rank 1 on node2 sum 1.0" in succeeds(pool, TWO)


def test_a_firewall_before_the_store(pool: DriverPool, cluster: Cluster) -> None:
    cluster.firewall("node1", "1024-65535")
    job = start(pool, MEET, TWO)
    assert job.wait(PATIENCE).state == "failed"
    words = rf"\bnode2 cannot reach node1's store at {cluster.address('node1')}:\d+: timed out; a firewall "
    assert re.search(words, job.state.reason), job.state.reason


@pytest.mark.parametrize("line", ["127.0.1.1 {}", pytest.param("", marks=pytest.mark.soak)])
def test_a_host_that_has_another_view_of_its_name(pool: DriverPool, write: Change, line: str) -> None:
    for node in ("node1", "node2"):
        write(node, "/etc/hosts", f"127.0.0.1 localhost\n{line.format(node)}\n")
    assert "rank 1 on node2 sum 1.0" in succeeds(pool, TWO)


# ---------------------------------------------------------------------------------------------------------- Pythons


def test_a_host_without_python(pool: DriverPool, write: Change) -> None:
    write("node1", "/root/.profile", "PATH=/nowhere\n")
    with pytest.raises(TorchDistError, match=r"node1 has no Python with torch \(found: no Python\)"):
        start(pool, MEET, ONE, python=None)


@pytest.mark.soak
def test_a_python_that_is_too_old_is_refused(pool: DriverPool) -> None:
    python = node_python.too_old()
    with pytest.raises(TorchDistError, match=rf"node1 has Python 3\.9 \({python}\); 3\.10 or newer is needed"):
        start(pool, MEET, f"{ONE} --host-option python={python}")


@pytest.mark.parametrize(
    ("path", "lack"),
    [
        ("/usr/bin/python3", "torch in"),
        ("/nowhere/bin/python", "Python at"),
        ("~/my env/bin/python", "Python at"),
    ],
)
def test_a_python_that_is_not_there_or_has_no_torch_is_refused(pool: DriverPool, path: str, lack: str) -> None:
    with pytest.raises(TorchDistError, match=f"node1 has no {lack} {path}") as caught:
        start(pool, MEET, f"{ONE} --host-option 'node1.python={path}'")
    assert "--host-option python=PATH" in str(caught.value)


def test_a_torch_that_is_too_old_is_refused(pool: DriverPool, write: Change) -> None:
    write("node1", "/srv/old/torch/__init__.py", "__version__ = '2.5.0'\n")
    write("node1", "/srv/old/torch-2.5.0.dist-info/METADATA", "Name: torch\nVersion: 2.5.0\n")
    write("node1", "/root/.profile", "export PYTHONPATH=/srv/old\n")
    with pytest.raises(TorchDistError, match=r"node1.* torch 2\.5\.0 is too old"):
        start(pool, MEET, ONE)


def test_a_package_that_a_host_lacks_is_refused_before_anything_starts(pool: DriverPool) -> None:
    with pytest.raises(TorchDistError, match=r"node1 \(.*\) lacks hypothesis \(line 2\)") as caught:
        start(pool, "import hypothesis\n" + MEET, ONE)
    assert f"ssh node1 'uv pip install -p {PYTHON} hypothesis==" in str(caught.value)


def test_what_differs_on_a_host_is_noted(pool: DriverPool, write: Change) -> None:
    write("node1", "/srv/other/numpy-0.9.dist-info/METADATA", "Name: numpy\nVersion: 0.9\n")
    write("node1", "/root/.profile", "export PYTHONPATH=/srv/other\n")
    job = start(pool, "import numpy\nprint(numpy.pi)", TWO)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert [note.splitlines()[0] for note in job.manifest.notes if "differs" in note] == [
        "what hosts have differs from this notebook: numpy"
    ]


BY_TURNS = """
import time, torch.distributed as dist
for turn in range(4):
    if turn % 2 == dist.get_rank():
        print("turn", turn, flush=True)
        time.sleep(0.5)
    dist.barrier()
time.sleep(3)
"""


def test_lines_of_a_host_whose_clock_is_wrong_stand_where_they_were_printed(
    pool: DriverPool, cluster: Cluster, write: Change
) -> None:
    cluster.kill("node1")  # with an agent that an earlier test may have left, whose clock is right
    cluster.start("node1")
    write("node1", "/srv/early/sitecustomize.py", "import time\nright = time.time\ntime.time = lambda: right() + 100\n")
    write("node1", "/root/.profile", "export PYTHONPATH=/srv/early\n")
    job = start(pool, BY_TURNS, TWO)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    logs = segments.find(job.paths)
    sizes = {name: log.size() for name, log in logs.items()}
    merged = Tail({}, None).poll(logs, sizes, time.monotonic(), 1 << 20, ended=True)
    assert b"".join(one.data for one in merged) == b"turn 0\nturn 1\nturn 2\nturn 3\n"
    assert json.loads(job.paths.clock("node0").read_text())["ahead"] == pytest.approx(100, abs=2)
    assert [note for note in job.state.notes if "ahead of this machine's" in note and "node1" in note]


EARLIER = """
import dataclasses, torch
from torch import nn

@dataclasses.dataclass
class Sizes:
    width: int = 3

class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layer = nn.Linear(sizes.width, 1)
        self.scale = lambda x: x * factor
    def forward(self, x):
        return self.scale(self.layer(x))

factor = 2
net = Net(Sizes())
"""
TRAINS = """
import sys, torch, torch.distributed as dist
class Wider(Net):
    def forward(self, x):
        return super().forward(x) + 1
wider = Wider(Sizes(4))
with torch.no_grad():
    for parameter in (*net.parameters(), *wider.parameters()):
        parameter.fill_(dist.get_rank() + 1)
        dist.all_reduce(parameter)
answer = net(torch.ones(3)).item(), wider(torch.ones(4)).item(), Sizes(5)
print(sys.version_info[:2])
"""


@pytest.mark.soak
def test_a_host_with_another_release_of_python(
    pool: DriverPool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = node_python.other()
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(linecache.cache, "earlier", (1, None, EARLIER.splitlines(keepends=True), "earlier"))
    exec(compile(EARLIER, "earlier", "exec"), vars(main))
    options = f"--hosts node2,node1 --ranks 2 --host-option node2.python={python}"
    job = start(pool, TRAINS, options, vars(main))
    assert job.wait(PATIENCE).state == "succeeded", (job.state.reason, job.logs())
    here, there = job.logs(1, stream="out").strip(), job.logs(0, stream="out").strip()
    assert (here, there != here) == (str(sys.version_info[:2]), True)
    assert any("Python" in note.splitlines()[0] for note in job.manifest.notes if "differs" in note)
    job.bring(vars(main))
    names = vars(main)
    assert names["answer"] == (24.0, 31.0, names["Sizes"](5))
    assert isinstance(names["wider"], names["Net"])
    assert names["wider"](names["torch"].ones(4)).item() == 31.0
    assert names["net"].layer.bias.item() == 3.0


@pytest.mark.soak
def test_an_exception_of_another_release_of_python(pool: DriverPool) -> None:
    python = node_python.other()
    source = "class Own(Exception): pass\ndef fails(x):\n    raise Own(x)\nfails(7)"
    job = start(pool, source, f"--hosts node2 --ranks 1 --host-option node2.python={python}")
    assert job.wait(PATIENCE).state == "failed"
    error = job.exception()
    assert (type(error).__name__, getattr(error, "args", ())) == ("Own", (7,))
