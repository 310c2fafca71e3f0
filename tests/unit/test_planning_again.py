"""The plan of the next attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_torchdist.planning.again import next_plan
from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.plan import Inventory, Plan
from jupyter_torchdist.protocol.spec import JobSpec, Options, parse_options

GIB = 1024**3


def planned(line: str) -> tuple[Plan, Options]:
    options = parse_options(f"--hosts a,b,c --ranks 6 --restarts 1 {line}")
    hosts = [Inventory(name, 8, 64 * GIB, addresses=(f"10.0.0.{n}",)) for n, name in enumerate("abc", 1)]
    return make_plan(JobSpec("j", "cell", "pass", "Cell In[1]", 2, options, 0.0), hosts), options


@pytest.mark.parametrize(("gone", "left"), [("node0", ["node1", "node2"]), ("node1", ["node0", "node2"])])
def test_ranks_are_numbered_anew_on_the_hosts_that_are_left(gone: str, left: list[str]) -> None:
    plan, options = planned("--nodes 2:3 --strategy fsdp")
    assert plan.strategy.degrees == {"dp_shard": 6}
    less = next_plan(plan, options, {gone}, 5.0)
    assert [(node.name, node.ranks) for node in less.nodes] == [(left[0], (0, 1)), (left[1], (2, 3))]
    assert (less.world_size, less.strategy.name, less.strategy.degrees) == (4, "fsdp", {"dp_shard": 4})
    assert all((node.address, node.interface) == ("", "") for node in less.nodes)


def test_a_host_alone_needs_no_address() -> None:
    plan, options = planned("--nodes 1:3")
    (node,) = next_plan(plan, options, {"node0", "node1"}, 5.0).nodes
    assert (node.name, node.ranks, node.address, node.interface) == ("node2", (0, 1), "127.0.0.1", "lo")


def test_what_auto_chose_stays() -> None:
    plan, options = planned("--nodes 1:3 --strategy auto")
    assert next_plan(plan, options, {"node0", "node1"}, 5.0).strategy.name == plan.strategy.name


def test_a_strategy_that_needs_all_ranks() -> None:
    plan, options = planned("--nodes 2:3 --strategy tp -O tp=6")
    with pytest.raises(OptionError, match="tp"):
        next_plan(plan, options, {"node0"}, 5.0)


def test_only_checkpoints_of_this_job_are_resumed() -> None:
    plan, options = planned("--strategy ddp --checkpoint runs")
    again = next_plan(plan, options, (), 5.0)
    assert (again.strategy.resume, again.strategy.since) == (True, 5.0)
    assert replace(again, strategy=plan.strategy) == plan
    assert next_plan(again, options, (), 9.0) == again
    assert next_plan(again, options, {"node1"}, 9.0).strategy.since == 5.0
    asked, options = planned("--strategy ddp --checkpoint runs --resume")
    assert next_plan(asked, options, (), 5.0) == asked


def test_fewer_hosts_than_the_option_says() -> None:
    with pytest.raises(OptionError, match=r"--nodes 2:4, but the job has 3 hosts\n.*--nodes 2:3"):
        planned("--nodes 2:4")
