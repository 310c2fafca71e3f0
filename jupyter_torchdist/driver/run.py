"""Performs the actions that ``policy`` decides. The driver is the only writer of a job's journal."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..launchers.base import Launcher, Submission
from ..planning.again import ready
from ..protocol.errors import ChannelError, LaunchError, StoreError
from ..protocol.eventreader import EventReader, reader_of
from ..protocol.events import INTERNAL, Event
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.process import ProcessId
from ..protocol.spec import JobSpec
from ..protocol.state import JobState, apply
from ..protocol.wire import messages
from ..protocol.wire.again import Again
from ..protocol.wire.assignment import Assignment
from ..protocol.world import World
from ..store import journal, liveness
from ..store.files import publish_json
from ..store.jobdir import read_plan, read_spec, taken_requests
from . import attempts, crossing, findings, policy, profiles, stall
from .cargo import cargoes
from .engine import Engine, begun
from .links import Link
from .linkselector import LinkSelector
from .stages import Stages
from .tracking import Trackers
from .unwritten import Unwritten

QUIET_TICK = 0.02
"""Seconds between two checks for requests of clients."""


class Driver:
    """Drives one job until its end. ``world`` is None for a driver that takes up the job of an earlier driver.

    ``find`` creates the launcher with a given name. ``blobs`` is the directory of captured data.
    """

    def __init__(self, paths: JobPaths, find: Callable[[str], Launcher], world: World | None, blobs: str = "") -> None:
        self._paths = paths
        self._world = world
        self._blobs = blobs
        self._spec: JobSpec = read_spec(paths)
        self._plan = read_plan(paths)
        self._state: JobState = journal.asked_for(paths)
        self._seen: set[tuple[float, str, str | None, int | None]] = set()
        self._submitted: list[Event] = []
        """What an earlier driver wrote of the submission."""
        self._unwritten = Unwritten(journal.Writer(paths, self._know))
        self._standing = policy.resumed(self._state)
        self._readers: dict[str, EventReader] = {}
        self._errors: dict[str, str] = {}
        """What launchers and agents said of their own failures, by node and kind."""
        self._stalls = stall.watch(self._spec.options.stall, self._state.stall)
        self._engine = Engine(lambda: find(self._spec.options.launcher), self._say)
        self._stages = Stages(self._plan, self._say)
        self._trackers = Trackers(paths, self._spec.options.track, world)
        self._links: list[Link] = []
        self._ears = LinkSelector()
        self._beat = float("-inf")
        self._deadline = self._deadline_from(begun(self._spec, self._submitted))
        self._attempt, self._fresh = max(1, self._state.attempt), self._plan.fresh
        self._endpoint: tuple[str, int] | None = None

    def _know(self, event: Event) -> None:
        """Take up an event that an earlier driver wrote."""
        self._state = apply(self._state, event)
        self._seen.add(event.key)
        if event.kind in ("job.launched", "job.engine"):
            self._submitted.append(event)

    def _deadline_from(self, begun: float) -> float:
        """The deadline on the monotonic clock, because the wall clock may be changed while the job runs."""
        return time.monotonic() + (self._plan.timeout or float("inf")) - max(0.0, time.time() - begun)

    # -- beginning

    def run(self) -> None:
        """Run until the job's end. Any error of the driver is written to the journal."""
        if self._state.final:  # an earlier driver died between the journal's last line and the summary
            journal.publish_summary(self._paths, self._state)
            return
        self._say("job.driver", process=ProcessId.mine().to_json())
        try:
            if self._world is not None:
                self._begin(fresh=self._plan.fresh)
            else:
                self._take_up()
            self._loop()
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self._unwritten.close(self._paths.root)
            for link in self._links:
                if link.channel is not None:
                    link.channel.close()
            self._ears.close()

    def _begin(self, fresh: bool, count: int = 0) -> None:
        size = self._plan.world_size
        self._say("job.starting", attempt=self._attempt, fresh=fresh, restarts=count, world_size=size)
        self._fresh = fresh
        self._make_links(self._engine.submit(self._plan, self._attempt))
        if not all(link.shared for link in self._links):
            needs = cargoes(self._paths, self._plan, Path(self._blobs))
            for link in self._links:
                link.prepare(needs[link.node.name])
        self._start(self._links[0])

    def _take_up(self) -> None:
        self._make_links(self._engine.attach(self._plan, self._submitted), started=True)
        self._read_all()

    def _make_links(self, submission: Submission, started: bool = False) -> None:
        self._take_gpus()
        for link in self._links:
            link.drop(time.monotonic())
            self._ears.watch(link)
        self._links = [
            Link(submission, self._plan, node, self._paths, self._attempt, started=started) for node in self._plan.nodes
        ]
        for link in self._links:
            if not self._engine.queued and not self._engine.ended:
                try:
                    link.open(time.monotonic())
                except (ChannelError, OSError):
                    link.drop(time.monotonic())
            self._ears.watch(link)

    def _take_gpus(self) -> bool:
        """Put the GPUs for which the job waited into its plan. Its time begins now. False if it did not wait."""
        before, self._plan = self._plan, self._engine.with_gpus(self._plan)
        if took := before != self._plan:
            publish_json(self._paths.plan, self._plan.to_json())
            self._deadline = self._deadline_from(time.time())
        return took

    @cached_property
    def _world_of_hosts(self) -> World | None:
        return self._world.for_a_host(self._plan.env_names) if self._world is not None else None

    def _start(self, link: Link) -> None:
        world = self._world if link.shared else self._world_of_hosts
        assert world is not None
        root, attempt, restarts = str(self._paths.root), self._attempt, self._state.restarts
        start = (attempt, self._fresh, restarts, self._endpoint, ready(self._plan, self._spec.options))
        link.start(Assignment(root, self._blobs, link.node.name, self._plan, world, *start))

    # -- the loop

    def _loop(self) -> None:
        while not self._state.final:
            for link in self._ears.wait(QUIET_TICK):
                self._on_messages(link)
            now = time.monotonic()
            self._engine.look(now)
            if self._take_gpus():
                self._make_links(self._links[0].submission)
                self._start(self._links[0])
            if not self._engine.queued:
                self._keep_links(now)
            self._take_requests()
            self._tick(now)

    def _keep_links(self, now: float) -> None:
        self._plan = self._engine.named(self._plan, self._links)
        for link in self._links:
            if self._engine.ended and link.channel is None and not link.ended:
                self._lose(link, self._engine.state.reason or "its launcher has ended it")
            else:
                link.keep(now)
                if news := link.news(now):
                    self._say("job.note", text=news)
                if link.lost(now, [other for other in self._links if other is not link]):
                    self._lose(link, link.why_down or "its agent cannot be reached")
            self._ears.watch(link)

    def _tick(self, now: float) -> None:
        if now - self._beat > liveness.BEAT:
            self._beat = now
            with contextlib.suppress(StoreError):
                liveness.publish_driver(self._paths, ProcessId.mine(), time.time())
            if not self._paths.spec.exists():  # no request to end it could come any more, and no result could be kept
                self._standing = replace(self._standing, terminate=True)
        self._write()
        waits = self._engine.queued and self._spec.options.wait
        if now > self._deadline and not (waits or self._standing.timed_out):
            self._standing = replace(self._standing, timed_out=True)
        if self._state.state == "starting" and policy.all_ready(self._plan, self._state):
            self._say("job.running")
        self._stages.look(self._links, self._state)
        self._trackers.look(now)
        if again := attempts.gone_on(self._readers):  # what follows was decided by the nodes
            if attempts.over(self._plan, again, self._standing.ended):
                self._go_on(again)
            return
        self._standing = policy.noted(self._standing, self._state, now, self._stalls.since(self._state, now))
        for action in policy.decide(self._plan, self._state, self._standing, now):
            self._perform(action)

    def _perform(self, action: policy.Action) -> None:
        if isinstance(action, policy.Stopping):
            self._say("job.stopping", reason=action.reason)
        elif isinstance(action, policy.Interrupt):
            self._standing = replace(self._standing, signalled=True)
            for link in self._links:
                link.signal(signal.SIGINT)
        elif isinstance(action, policy.AskPlaces):
            self._standing = policy.after_asking(self._standing, time.monotonic())
            for link in self._links:
                link.ask_places()
        elif isinstance(action, policy.SayStalled):
            self._say_stalled(action)
        elif isinstance(action, policy.SayResumed):
            self._say("job.resumed")
        elif isinstance(action, policy.End):
            self._standing = replace(self._standing, end_sent=action.grace)
            if self._engine.queued:
                self._engine.cancel()
            for link in self._links:
                if link.involved and not self._engine.queued:
                    link.end(action.grace)
                else:
                    self._standing = replace(self._standing, ended=self._standing.ended | {link.node.name})
                    link.ended = True
        elif isinstance(action, policy.Again):
            self._again(action)
        elif isinstance(action, policy.Finish):
            self._finish(action)

    def _say_stalled(self, action: policy.SayStalled) -> None:
        now = time.monotonic()
        finding = findings.of_stall(self._plan, self._spec, self._state, self._stalls.at_work(now))
        ends = self._spec.options.stall_kill or not action.begun
        self._say("job.stalled", since=time.time() - (now - action.since), finding=finding, ends=ends)

    def _again(self, action: policy.Again) -> None:
        files, moved = self._paths, self._standing.taken is not None or bool(self._standing.expired)
        found = attempts.next_attempt(files, self._plan, self._spec, self._state, action, self._world, moved)
        if isinstance(found, policy.Finish):
            self._finish(found)
            return
        self._say("job.note", text=action.note)
        self._turn_to(found, self._attempt + 1)
        self._begin(action.fresh, action.restarts)

    def _turn_to(self, plan: Plan, attempt: int) -> None:
        self._plan, self._attempt = plan, attempt
        self._standing, self._endpoint = attempts.of_next(self._standing), None
        self._stalls.forget()
        self._errors.clear()

    def _go_on(self, again: Again) -> None:
        """Follow an attempt that the nodes have begun while no driver was connected."""
        end, plan = policy.finish(self._plan, self._state, self._standing), self._plan
        self._turn_to(attempts.followed(self._paths, plan, self._spec, again), again.attempt)
        self._say("job.note", text=attempts.in_words(end, self._plan, again))
        size = self._plan.world_size
        self._say("job.starting", attempt=self._attempt, fresh=self._fresh, restarts=again.restarts, world_size=size)
        self._make_links(self._links[0].submission, started=True)
        self._read_all()

    def _finish(self, end: policy.Finish) -> None:
        if not self._paths.spec.exists():
            end = replace(end, state="lost", reason=f"the files of job {self._paths.job} were deleted while it ran")
        elif end.state == "lost" and self._engine.ended:
            end = replace(end, reason=f"the launcher ended it: {self._engine.state.reason or 'no reason is known'}")
        reason = end.reason
        if attempts.unexplained(self._state, end):
            reason += "\n" + findings.of_nodes(self._paths, self._plan, self._state, self._errors)
        causes = end.findings or findings.of(self._paths, self._plan, self._state, end.state, end.first_failure)
        for came in filter(None, [link.came for link in self._links]):
            self._say("job.note", text=came)
        self._say("job.ended", state=end.state, reason=reason.strip(), first_failure=end.first_failure, findings=causes)
        with contextlib.suppress(StoreError):
            journal.publish_summary(self._paths, self._state)
        for link in self._links:
            link.forget()
        self._engine.cancel()

    def _give_up(self, error: Exception) -> None:
        """After a bug of the driver, or a refusal: write it down. A job that is driven elsewhere is left alone."""
        taken_over = isinstance(error, crossing.TakenOver)
        for link in self._links:
            link.drop(time.monotonic()) if taken_over else link.end(0.0)
        self._engine.cancel()
        reason = error.message if isinstance(error, LaunchError) else f"the driver failed: {error!r}"
        with contextlib.suppress(StoreError):
            self._say("job.ended", state="lost" if taken_over else "failed", reason=reason, first_failure=None)
            journal.publish_summary(self._paths, self._state)

    def _lose(self, link: Link, reason: str) -> None:
        if link.node.name not in self._standing.lost:
            self._say("node.lost", node=link.node.name, reason=reason)
            self._standing = replace(
                self._standing, lost=self._standing.lost | {link.node.name}, taken=self._engine.taken
            )
            link.ended = link.given_up = True

    # -- what agents say

    def _on_messages(self, link: Link) -> None:
        try:
            for message, body in link.receive(time.monotonic()):
                self._on_message(link, message, body)
        except (OSError, ChannelError):  # a full disk, nonsense: over a new channel the node sends what is missing
            link.drop(time.monotonic())
        self._ears.watch(link)  # at once: a new channel may soon reuse the closed descriptor's number

    def _on_message(self, link: Link, message: dict[str, Any], body: bytes) -> None:
        said = messages.understood(messages.AGENT_SAYS, message)
        if isinstance(said, messages.Grown):
            self._read_events(link, said.file)
        elif isinstance(said, messages.FileBytes):
            link.copies.append(said.file, said.offset, body)
            if said.file.startswith("nodes/") and said.file.endswith(".events"):
                self._read_events(link, said.file)
        elif isinstance(said, messages.Ended) and said.attempt == self._attempt:
            link.ended = True
            self._standing = replace(self._standing, ended=self._standing.ended | {link.node.name})
        elif isinstance(said, messages.Quiet) and said.attempt == self._attempt:
            self._stalls.told(said.ranks, time.monotonic())
        elif isinstance(said, messages.Steward) and said.attempt == self._attempt:
            for other in self._links[1:]:
                other.introduce(said)
        elif isinstance(said, (messages.RefusedJob, messages.Replaced)):
            raise crossing.refusal(said, link.node, self._plan)
        else:
            link.take(said, body)

    def _read_all(self) -> None:
        """Read the events of all files in the job directory, for a driver that takes up a job."""
        for link in self._links:
            for file in sorted(self._paths.node(link.node.name).root.glob("*.events")):
                self._read_events(link, str(file.relative_to(self._paths.root)))

    def _read_events(self, link: Link, name: str) -> None:
        files, ranks = self._paths.node(link.node.name), link.node.ranks
        found = reader_of(files, ranks, Path(name).name)
        if found is None:
            return
        reader = self._readers.setdefault(name, found)
        reader.source = found.source  # ranks of a later attempt may have other numbers
        reader.restarts = self._state.restarts
        refused = reader.refused
        while events := reader.read():
            for event in events:
                self._take(link, replace(event, node=link.node.name))
        if reader.refused and not refused:
            text = f"{reader.path.name} on {link.node.called} has lines that its owner may not write; they are ignored"
            self._say("job.note", text=text)

    def _take(self, link: Link, event: Event) -> None:
        """Write a node's event to the journal, unless it is there already."""
        if event.kind == "launcher.rendezvous" and link is self._links[0]:
            self._endpoint = (event.data["address"], event.data["port"])
            self._start_others()
        self._standing = policy.told(self._standing, event)
        if event.kind in ("launcher.ended", "node.ended") and event.data.get("error"):
            self._errors[f"{event.node} {event.kind}"] = event.data["error"].strip().rpartition("\n")[2]
        if event.kind not in INTERNAL and event.key not in self._seen:
            self._append(event)

    def _start_others(self) -> None:
        for link in self._links[1:]:
            if not link.started and self._world is not None and self._standing.end_sent is None:
                self._start(link)

    # -- what clients ask

    def _take_requests(self) -> None:
        for asked in taken_requests(self._paths):
            self._standing = policy.asked(self._standing, asked.kind)
            if asked.profile is not None:
                profiles.ask(self._links, asked.profile, self._say)

    # -- the journal

    def _say(self, kind: str, node: str | None = None, **data: Any) -> None:
        self._append(Event(kind, time.time(), node=node, data=data))
        self._write()

    def _append(self, event: Event) -> None:
        self._unwritten.append(event)
        self._state = apply(self._state, event)

    def _write(self) -> None:
        self._state = replace(self._state, seq=self._unwritten.write())
