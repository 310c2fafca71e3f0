"""``--hosts`` and its settings; how many ranks each host gets; the commands for ssh."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_torchdist.launchers.booted import remote_command
from jupyter_torchdist.launchers.code import code
from jupyter_torchdist.launchers.ssh.connection import CIPHER, shared_connection, ssh_words
from jupyter_torchdist.node import routes
from jupyter_torchdist.planning.configuration import configured, words_of
from jupyter_torchdist.planning.placing import places
from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol.errors import OptionError, ResourceError
from jupyter_torchdist.protocol.hosts import Host, hosts_of, known_hosts, parse_setting
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.plan import Gpu, Inventory, NodePlan, Reach, open_gpu
from jupyter_torchdist.protocol.spec import JobSpec
from jupyter_torchdist.protocol.wire.assignment import Assignment
from jupyter_torchdist.protocol.world import World
from jupyter_torchdist.testing import a_plan, a_spec


def inventory(
    name: str, slots: int | None = None, gpus: int = 0, addresses: tuple[str, ...] = ("10.0.0.1",)
) -> Inventory:
    cards = tuple(Gpu(f"{name}-{index}", index, "H100", 2**36, 0) for index in range(gpus))
    return Inventory(name, 8, 2**36, cards, slots=slots, addresses=addresses)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu1,-oProxyCommand=x", "'-oProxyCommand=x' is none"),
        ("gpu1:", "after the colon of 'gpu1:'"),
        ("gpu1:0", "after the colon of 'gpu1:0'"),
        ("gpu 1", "'gpu 1' is none"),
        (",", "at least one host"),
    ],
)
def test_a_bad_host_is_told(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_options(["--hosts", text])


@pytest.mark.parametrize("text", ["gpu1", "gpu1.pythn=/x", "python=", "=x", "@big=", "gpu1:2.python=/x"])
def test_a_bad_setting_is_told(text: str) -> None:
    with pytest.raises(OptionError, match="python, scratch, setup, bring, or @GROUP"):
        parse_options(["--host-option", text])


def test_settings_of_a_host_come_before_those_of_all() -> None:
    settings = [
        parse_setting(text)
        for text in ("python=/all", "gpu1.python=/one", "setup=module load cuda", "@big=gpu1,gpu2:4")
    ]
    all_, one = Reach("/all", "", "module load cuda"), Reach("/one", "", "module load cuda")
    assert hosts_of(["@big", "me@gpu3"], settings) == (
        Host("gpu1", None, one),
        Host("gpu2", 4, all_),
        Host("me@gpu3", None, all_),
    )


@pytest.mark.parametrize(
    ("hosts", "settings", "words"),
    [
        (["a", "a:2"], [], "a stands there 2 times"),
        (["@big"], ["@small=a"], "no group @big; known: @small"),
        (["@big"], ["@big=a,@big"], "@big contains itself"),
    ],
)
def test_hosts_that_cannot_be_are_told(hosts: list[str], settings: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        hosts_of(hosts, settings)


def test_a_file_sets_hosts_and_groups() -> None:
    table = {"hosts": {"python": "/all", "big": ["gpu1", "gpu2:4"], "gpu1": {"python": "/one", "scratch": "/data"}}}
    options = parse_options(words_of(Path("torchdist.toml"), table))
    assert options.host_option == ("python=/all", "@big=gpu1,gpu2:4", "gpu1.python=/one", "gpu1.scratch=/data")
    assert parse_options(words_of(Path("t"), {"hosts": ["gpu1", "gpu2:4"]})).hosts == ("gpu1", "gpu2:4")


def test_hosts_need_the_launcher_of_hosts() -> None:
    assert configured("--hosts a", Path("/")).launcher == "ssh"
    with pytest.raises(OptionError, match="this machine only"):
        parse_options("--hosts a --launcher local")


def test_ranks_are_shared_out() -> None:
    hosts = [inventory("a"), inventory("b", 4), inventory("c")]
    assert places(12, hosts, [8, 8, 8]) == [4, 4, 4]
    assert places(13, hosts, [8, 8, 8]) == [5, 4, 4]
    assert places(13, hosts, [2, 8, 8]) == [2, 4, 7]
    assert places(None, hosts, [3, 8, 5]) == [3, 4, 5]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(5, "3 hosts need more than 5 ranks"), (30, "do not fit on the hosts; they have room for: a 8, b 8, c 8")],
)
def test_ranks_that_do_not_fit_are_told(wanted: int, words: str) -> None:
    with pytest.raises(ResourceError, match=words):
        places(wanted, [inventory("a"), inventory("b", 4), inventory("c")], [8, 8, 8])


def test_a_plan_of_two_hosts() -> None:
    spec = JobSpec("j", "cell", "", "", 1, parse_options("--hosts a,b:2 --gpus 5"), 0.0)
    plan = make_plan(spec, [inventory("a", gpus=4), inventory("b", 2, gpus=8)])
    assert [node.ranks for node in plan.nodes] == [(0, 1, 2), (3, 4)]
    assert [node.gpus for node in plan.nodes] == [("a-0", "a-1", "a-2"), ("b-0", "b-1")]
    assert [(node.address, node.interface) for node in plan.nodes] == [("10.0.0.1", ""), ("", "")]
    with pytest.raises(ResourceError, match="a has no address"):
        make_plan(spec, [inventory("a", gpus=4, addresses=()), inventory("b", 2, gpus=8)])


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_command_says_what_it_searched(shell: str, tmp_path: Path) -> None:
    """One line that every login shell understands, also with quotes in a path."""
    command = remote_command("MARK", Reach(python="/no/such 'python'"), "relay")
    assert "\n" not in command
    assert not set(command[len("exec sh -c '") : -1]) & set("'!\\")
    said = subprocess.run(
        [shell, "-c", command], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    )
    assert "MARK cannot has no Python at /no/such 'python' (found: no Python)" in said.stdout


def test_equal_code_has_an_equal_digest() -> None:
    first = code()
    code.cache_clear()
    assert code() == first


def test_the_hosts_of_a_file_are_known() -> None:
    settings = ["@big=gpu1,gpu2:4", "@all=gpu3", "gpu4.python=/p", "python=/q"]
    assert known_hosts(settings) == ("gpu1", "gpu2:4", "gpu3", "gpu4")
    assert known_hosts(["python=/q"]) == ()


@pytest.mark.parametrize(
    ("kind", "name", "is_one"),
    [
        ("A10", "NVIDIA A10", True),
        ("a10", "NVIDIA A10G", False),
        ("A10", "NVIDIA A100-SXM4-40GB", False),
        ("h100_80gb", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3", True),
        ("V100", "Tesla V100-SXM2-16GB", True),
        ("80GB H100", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_the_name_of_a_gpu(kind: str, name: str, is_one: bool) -> None:
    assert Gpu("u", 0, name, 0, 0).is_a(kind) == is_one


def hosts_with(**cards: int | tuple[str, int]) -> list[Inventory]:
    """Inventories of hosts by name; a number of A10s, or a name and a number."""
    found = []
    for name, card in cards.items():
        kind, count = card if isinstance(card, tuple) else ("NVIDIA A10", card)
        gpus = tuple(Gpu(f"{name}-{index}", index, kind, 2**34, 0) for index in range(count))
        found.append(Inventory(name, 8, 2**36, gpus, addresses=("10.0.0.1",)))
    return found


def planned(inventories: list[Inventory], *words: str) -> dict[str, int]:
    spec = JobSpec("j", "cell", "pass", "Cell In[1]", 2, parse_options([*words]), 0.0)
    return {node.host: len(node.ranks) for node in make_plan(spec, inventories).nodes}


def test_gpus_of_a_type_on_as_few_hosts_as_will_do() -> None:
    hosts = hosts_with(a=2, b=("NVIDIA H100 80GB HBM3", 8), c=4, d=4)
    assert planned(hosts, "--remote", "--gpu-type", "A10", "--gpus", "4") == {"c": 4}
    assert planned(hosts, "--remote", "--gpu-type", "A10", "--gpus", "8") == {"c": 4, "d": 4}
    assert planned(hosts, "--remote", "--gpu-type", "A10") == {"a": 2, "c": 4, "d": 4}
    assert planned(hosts, "--remote", "--gpu-type", "h100") == {"b": 8}
    assert planned(hosts, "--remote", "--ranks", "3") == {"a": 3}
    assert planned(hosts[:1], "--gpu-type", "A10", "--gpus", "1") == {"a": 1}


def test_a_type_that_no_host_has_is_told() -> None:
    hosts = hosts_with(a=2, b=("NVIDIA H100 80GB HBM3", 1))
    with pytest.raises(ResourceError, match="a has no GPU L40S: it has 2 NVIDIA A10; b has no GPU L40S: it has 1 NV"):
        planned(hosts, "--remote", "--gpu-type", "L40S")
    with pytest.raises(ResourceError, match="b has no GPU A10"):
        planned(hosts, "--gpu-type", "A10", "--gpus", "2")
    with pytest.raises(ResourceError, match="has no GPU A10: it has none"):
        planned([Inventory("here", 2, 2**36)], "--gpu-type", "A10")
    with pytest.raises(ResourceError, match="4 ranks do not fit on the hosts"):
        planned(hosts_with(a=1, c=2), "--remote", "--gpu-type", "A10", "--gpus", "4")
    with pytest.raises(OptionError, match="--gpu-type is for GPU ranks"):
        parse_options(["--ranks", "2", "--gpu-type", "A10"])
    with pytest.raises(OptionError, match="the name of a GPU"):
        parse_options(["--gpu-type", "-"])


def test_gpus_that_the_engine_chose_are_those_that_are_visible_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "gpus", tuple)
    node = NodePlan("node0", (0, 1), tuple(open_gpu(index, "a100").uuid for index in range(2)), interface="eth0")
    plan = replace(a_plan(a_spec()), nodes=(node,))
    world = World({"CUDA_VISIBLE_DEVICES": "3,5,6"}, "/", (), 0o22, {}, "python")
    assignment = Assignment("/jobs/j", "/blobs", "node0", plan, world)
    assert routes.with_route(assignment).nodes[0].gpus == ("3", "5")
    few = replace(assignment, world=replace(world, environ={"CUDA_VISIBLE_DEVICES": "3"}))
    with pytest.raises(OSError, match="the engine gave 1 GPUs, and 2 ranks need one each"):
        routes.with_route(few)


def test_the_engines_node_names_the_address_for_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "interfaces", lambda: {"10.0.0.1": "eth0", "10.1.0.1": "ib0"})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **more: [(2, 1, 6, "", ("10.1.0.1", 0))])
    assert routes.addresses({"SLURMD_NODENAME": "node1"}) == ["10.1.0.1", "10.0.0.1"]
    assert routes.addresses({}) == ["10.0.0.1", "10.1.0.1"]


@pytest.mark.parametrize(
    ("settings", "first"), [("", CIPHER), ("Ciphers aes256-ctr\n", None), ("Ciphers ^aes256-ctr\n", None)]
)
def test_the_fast_cipher_comes_first_unless_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, first: str | None
) -> None:
    (tmp_path / "config").write_text(f"Host *\n{settings}")
    client = tmp_path / "ssh"
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    client.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    shared_connection.cache_clear()
    chosen = [word.removeprefix("Ciphers=") for word in ssh_words("gpu1") if word.startswith("Ciphers=")]
    shared_connection.cache_clear()
    if first is None:
        assert chosen == []
    else:
        assert chosen[0].startswith(f"{first},")
        assert len(set(chosen[0].split(","))) > 3
