"""Another attempt that the nodes begin by themselves, after some of them were missed while no driver was connected.

More than half of the nodes must be left, or half of them with the first one: else both sides of a network that is cut
in two would go on. The steward waits until the attempt has ended on all that are left, begins the next one, and tells
the others where its ranks meet. It has what a driver would send: the last order, and the strategies for fewer ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..protocol.disk import read_plain
from ..protocol.events import parse_lines
from ..protocol.plan import Died
from ..protocol.process import ProcessId
from ..protocol.wire.again import Again, continued, in_vain, last_step, left, sizes
from ..protocol.wire.assignment import Assignment
from .nodejob import NodeJob
from .routes import with_route
from .shipping.replica import write_private

FAULT = "host"
"""As a driver calls the loss of a host."""


@dataclass
class Renewals:
    """``orders``: by which the jobs' last attempts were begun here. ``begin`` starts the launcher of an attempt."""

    jobs: dict[str, NodeJob]
    orders: dict[str, Assignment]
    begin: Callable[[Assignment], None]

    def turn(self, name: str, now: float, attended: bool) -> None:
        """Begin the job's next attempt here, when it is time; tell the others where its ranks meet."""
        job, order = self.jobs[name], self.orders.get(name)
        if job.watch is None or order is None:
            return
        if job.state == "ended" and not attended and (again := self._next(job, order, now)):
            self._begin(job, order, again, now)
        elif job.endpoint is not None:
            job.watch.tell(job.endpoint, now)

    def _next(self, job: NodeJob, order: Assignment, now: float) -> Again | None:
        assert job.watch is not None
        if (again := job.watch.asked) or not (lost := job.watch.gathered(now)):
            return again
        started = _started(job)
        died = Died(order.attempt, FAULT, last_step({job.files.metrics(rank): t for rank, t in started.items()}))
        if not _may(order, lost) or not (started or order.restarts) or in_vain(order.plan, died):
            job.watch.give_up()
            return None
        since = min(started.values(), default=0.0)
        return Again(order.attempt + 1, order.restarts + 1, lost, since, died)

    def _begin(self, job: NodeJob, order: Assignment, again: Again, now: float) -> None:
        nodes = left(order.plan.nodes, again.without)
        strategy = order.left.get(sizes(nodes), order.plan.strategy)
        plan = continued(order.plan, nodes, strategy, again.since, again.died)
        order = replace(order, plan=plan, attempt=again.attempt, restarts=again.restarts, rendezvous=again.rendezvous)
        order = replace(order, plan=with_route(order))
        write_private(job.paths.plan, order.plan.text)
        for result in job.paths.results.iterdir():
            result.unlink(missing_ok=True)
        new = NodeJob(job.paths, job.node, order.node_plan().ranks, order.attempt)
        new.events.write(
            "node.up",
            agent=ProcessId.mine().to_json(),
            restarts=again.restarts,
            attempt=again.attempt,
            without=list(again.without),
            since=again.since,
            died=again.died.to_json(),
        )
        new.go_on_after(job)
        if new.watch is not None:
            new.watch.renew(order.plan, again, new.events.write, now)
        job.close()
        self.jobs[order.job], self.orders[order.job] = new, order
        self.begin(order)


def _may(order: Assignment, lost: tuple[str, ...]) -> bool:
    """Whether the nodes that are left may go on."""
    plan = order.plan
    nodes = left(plan.nodes, lost)
    if plan.least_nodes is None or len(nodes) < plan.least_nodes or order.restarts >= plan.restarts:
        return False
    if 2 * len(nodes) < len(plan.nodes) or (2 * len(nodes) == len(plan.nodes) and plan.nodes[0].name in lost):
        return False
    return plan.strategy.name == "none" or sizes(nodes) in order.left


def _started(job: NodeJob) -> dict[int, float]:
    """When this attempt's ranks of this node began, of those whose user code has begun."""
    found: dict[int, float] = {}
    for rank in job.ranks:
        try:
            events = parse_lines(read_plain(job.files.rank_events(rank))).events
        except OSError:
            continue
        starts = [event.t for event in events if event.kind == "rank.started"]
        if starts and any(event.kind == "rank.ready" and event.t >= starts[-1] for event in events):
            found[rank] = starts[-1]
    return found
