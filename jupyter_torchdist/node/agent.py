"""One agent per user and node. The agent serves many drivers, starts and watches jobs, and ships what jobs write.

It holds no state that its files do not hold: after its death the next one takes up every job from there.
What it is sent and answers is in ``protocol/wire/messages.py``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..protocol.disk import in_words
from ..protocol.errors import ChannelError
from ..protocol.machine import inventory
from ..protocol.machine.tickets import Kept
from ..protocol.paths import JobPaths, safe_name
from ..protocol.process import ProcessId, children, job_token_of, session_of
from ..protocol.wire import messages
from ..protocol.wire.assignment import Assignment
from ..protocol.wire.channel import Channel
from ..protocol.wire.connect import Door
from .adopting import adopted, killed, left_by_another
from .again import Renewals
from .file_watch import Changes
from .gauges import GaugeWatch
from .nodejob import NodeJob
from .routes import addresses, with_route
from .shipping.handover import copied, taken_over
from .shipping.peer import Peer
from .shipping.receiving import Receiving
from .shipping.replica import (
    continued,
    discard,
    replica,
    replica_blobs,
    replica_paths,
    trust_replica,
    write_private,
)
from .shipping.tail import Shipment
from .starts import Starts
from .unattended.orphans import Orphans

LINGER_SECONDS = 2.0
"""The agent exits when it has had no driver and no job for this time."""

SILENCE_SECONDS = 30.0
"""A driver that sends nothing for this time counts as dead (a driver pings every 2 seconds)."""

FAST_TICK, SLOW_TICK = 0.004, 0.02
"""Seconds between two looks at the event files: a quarter of the time since the last change, within these limits."""

EXPIRING = "expiring"
"""A file in the runtime directory, which an engine's process writes before the engine ends all: the reason."""

SETTLED_SECONDS, QUIET_TICK = 0.2, 0.25
"""When nothing changed for ``SETTLED_SECONDS`` and inotify reports changes, the agent polls every ``QUIET_TICK``."""


class Agent:
    """The agent's event loop: frames from drivers and zygotes, the files of jobs, timeouts."""

    def __init__(self, listener: socket.socket, directory: Path) -> None:
        self._door = Door(listener)
        self._directory = directory
        self._expiring = directory.parent / EXPIRING
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._peers: list[Peer] = []
        self._jobs: dict[str, NodeJob] = {}
        self._orphans = Orphans(directory / "driver.log")
        self._ended_early: dict[str, int] = {}
        """Jobs that were ended before their start order came, with the attempt: the order may still be on its way."""
        self._stop = False
        self._child_died = True
        self._reap_at = 0.0
        self._changed = 0.0
        self._changes = Changes()
        if self._changes.fd >= 0:
            self._selector.register(self._changes.fd, selectors.EVENT_READ, lambda mask: self._changes.drain())
        self._gauges = GaugeWatch()
        self._gpus = Kept()
        self._idle_since = time.monotonic()
        self._starts = Starts(directory / "zygote.log", self._jobs, self._register, self._unregister)
        self._receiving = Receiving(self._peers, self._starts.pool.warm, addresses)
        self._selector.register(self._receiving, selectors.EVENT_READ, lambda mask: None)
        self._renewals = Renewals(self._jobs, self._starts.orders, partial(self._starts.start, doubt=False))

    # -- the loop

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, self._on_child)
        try:
            while not self._done():
                now = time.monotonic()
                for key, mask in self._selector.select(self._tick(now) if self._active() or self._speaks() else 0.5):
                    key.data(mask)
                self._turn()
        finally:
            self._starts.pool.close()
            self._changes.close()
            self._gauges.close()
            self._receiving.close()

    def _tick(self, now: float) -> float:
        if now - self._changed > SETTLED_SECONDS and all(self._told_of(job) for job in self._jobs.values()):
            return QUIET_TICK
        return min(SLOW_TICK, max(FAST_TICK, (now - self._changed) / 4))

    def _told_of(self, job: NodeJob) -> bool:
        """Whether inotify reports every change the agent needs to see. False if logs must be shipped (no watch)."""
        if job.state == "ended":
            return True
        return job.shared and self._changes.watch(job.paths.job, job.files.root, job.event_files())

    def _on_stop(self, *_: object) -> None:
        self._stop = True

    def _on_child(self, *_: object) -> None:
        self._child_died = True

    def _active(self) -> bool:
        going = any(job.state != "ended" for job in self._jobs.values())
        return going or self._receiving.busy or any(peer.channel.pending for peer in self._peers)

    def _speaks(self) -> bool:
        return any(job.speaks for job in self._jobs.values())

    def _done(self) -> bool:
        if self._stop and not self._active():
            return True
        if self._peers or self._active() or self._speaks():
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since > LINGER_SECONDS

    def _turn(self) -> None:
        now = time.monotonic()
        if self._child_died or now > self._reap_at:  # a child may die before it becomes ours
            self._child_died = False
            self._reap_at = now + 1.0
            self._reap()
            self._look_for_an_end(now)
        for name, job in list(self._jobs.items()):
            if job.poll(now, partial(self._strays, job), killed(job) if self._stop else ""):
                self._changed = now
            self._ship(name, job, now)
        self._receiving.turn(now)
        self._changed = now if self._receiving.moving else self._changed
        self._gauges.turn(self._jobs, now)
        self._gpus.only(self._may_run)
        self._drop_silent(now)
        self._care_for_orphans(now)
        if self._starts.turn(now):
            self._changed = now

    def _may_run(self, name: str) -> bool:
        """Whether ranks of the job run here, or its driver may start them."""
        job = self._jobs.get(name)
        if job is not None and job.state != "ended":
            return True
        waits = any(peer.job == name for peer in self._peers) or (job is not None and job.speaks)
        return waits and (job is None or job.may_restart)

    def _look_for_an_end(self, now: float) -> None:
        with contextlib.suppress(OSError):
            if reason := self._expiring.read_text().strip():
                for job in self._jobs.values():
                    job.expire(reason, now)

    def _reap(self) -> None:
        self._starts.reap()
        self._orphans.reap()
        for pid in children() - self._known():  # known processes are reaped by their Popen
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _known(self) -> set[int]:
        return self._starts.pids | self._orphans.pids | self._receiving.pids

    def _strays(self, job: NodeJob) -> list[ProcessId]:
        """Orphaned processes that left their session and cleared their environment. Empty while another job runs.

        The agent is the subreaper of all jobs, so these processes are its children. With one job, they belong to it.
        """
        if any(other is not job and other.state != "ended" for other in self._jobs.values()):
            return []
        zygotes = {zygote.process.pid for zygote in self._starts.pool.zygotes.values()}
        orphans = [ProcessId.of(pid) for pid in children() - self._known()]
        return [p for p in orphans if p.ticks and session_of(p.pid) not in zygotes and not job_token_of(p.pid)]

    # -- connections

    def _register(self, channel: Channel, on_readable: Callable[[], None]) -> None:
        """Wake up for what the other side says. ``_turn`` writes what is pending."""
        self._selector.register(channel.read_fd, selectors.EVENT_READ, lambda mask: on_readable())

    def _await_room(self, peer: Peer) -> None:
        """Wake up when the peer can take more, too, while bytes wait for it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.pending else 0)
        key = self._selector.get_key(peer.channel.read_fd)
        if key.events != events:
            self._selector.modify(peer.channel.read_fd, events, key.data)

    def _unregister(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.read_fd)

    def _accept(self, mask: int) -> None:
        if channel := self._door.accept():
            peer = Peer(channel)
            self._peers.append(peer)
            self._register(peer.channel, lambda: self._on_readable(peer))

    def _on_readable(self, peer: Peer) -> None:
        try:
            for message, body in peer.channel.receive():
                peer.heard = time.monotonic()
                self._on_message(peer, message, body)
        except (EOFError, ChannelError):
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._unregister(peer.channel)
        peer.channel.close()
        self._receiving.forget(peer)

    def _drop_silent(self, now: float) -> None:
        for peer in list(self._peers):
            try:
                peer.channel.flush()
            except ChannelError:
                self._drop(peer)
                continue
            if now - peer.heard > SILENCE_SECONDS and peer.job is not None:
                self._drop(peer)
            else:
                self._await_room(peer)

    # -- messages

    def _on_message(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        said = messages.understood(messages.DRIVER_SAYS, message)
        try:
            getattr(self, f"_on_{message['type']}")(peer, said, body)
        except OSError as error:
            self._refuse(peer, getattr(said, "job", ""), error)
        except ChannelError:
            raise
        except Exception as error:  # a message that nothing fits must not end the jobs of other drivers
            traceback.print_exc()
            raise ChannelError(f"a message {message['type']!r} with wrong data: {error!r}") from error

    def _refuse(self, peer: Peer, name: str, error: OSError) -> None:
        """Tell the driver why this node cannot do what it asked for (a full disk, no process available)."""
        job = self._jobs.get(name)
        if job is not None and job.launcher is None:
            job.expected = False
            job.end(0.0, time.monotonic())
        peer.channel.send({"type": "refused", "job": name, "reason": in_words(error)})

    def _on_hello(self, peer: Peer, said: messages.Hello, body: bytes) -> None:
        peer.process = said.process
        jobs = [name for name, job in self._jobs.items() if job.state != "ended"]
        place = self._door.listener.getsockname()
        own = addresses(peer.environ) if peer.login else []
        peer.channel.send(peer.welcome(said.software, self._starts.pool.describe(), jobs, place, own))

    def _on_login(self, peer: Peer, said: messages.Login, body: bytes) -> None:
        peer.login = said

    def _on_same_login(self, peer: Peer, said: messages.SameLogin, body: bytes) -> None:
        peer.login = next((other.login for other in self._peers if other.name == said.login), None)
        if peer.login is None:
            raise ChannelError("the connection with this login has ended")

    def _on_warm(self, peer: Peer, said: messages.Warm, body: bytes) -> None:
        if said.python:
            self._starts.pool.warm(said.python, said.environ)
        elif peer.login:
            self._starts.pool.warm(peer.login.python, peer.login.environ)

    def _on_ping(self, peer: Peer, said: messages.Ping, body: bytes) -> None:
        peer.channel.send({"type": "pong", "t": said.t, "clock": time.time()})

    def _on_stop_warm(self, peer: Peer, said: messages.Nothing, body: bytes) -> None:
        self._starts.pool.close()
        self._stop = True

    def _on_prepare(self, peer: Peer, said: messages.Prepare, body: bytes) -> None:
        """On a node without the driver's disk: take its GPUs, store its files, answer which blobs are missing."""
        if self._replaced(peer, said):
            return
        peer.job = said.job
        if said.gpus and (taken := self._gpus.claim(said.job, said.gpus, said.origin, inventory.gpus())):
            peer.channel.send({"type": "refused", "job": said.job, "reason": taken})
            return
        job = self._jobs.get(said.job)
        begun = job is not None and job.attempt >= said.attempt  # said again after its channel broke
        missing = messages.Missing(said.job, (), True) if begun else self._receiving.prepare(peer, said)
        peer.channel.send({"type": "missing", **missing.to_json()})

    def _on_copy(self, peer: Peer, said: messages.OfJob, body: bytes) -> None:
        peer.channel.send({"type": "copied", **copied(peer.scratch, said.job).to_json()})

    def _replaced(self, peer: Peer, said: messages.Prepare | messages.Follow) -> bool:
        """Whether another machine drives the job now. If this one does, the driver before it is told, and let go."""
        if by := taken_over(replica_paths(peer.scratch, said.job), said.driver, said.origin):
            peer.channel.send({"type": "replaced", "job": said.job, "by": by})
        for other in [other for other in self._peers if other.job == said.job and other.driver < said.driver]:
            other.give_up(said.job)
            other.channel.send({"type": "replaced", "job": said.job, "by": said.origin})
        peer.driver = said.driver
        return bool(by)

    def _on_blob(self, peer: Peer, said: messages.BlobPiece, body: bytes) -> None:
        self._receiving.take(peer, said, body)

    def _on_fetch(self, peer: Peer, said: messages.Fetch, body: bytes) -> None:
        self._receiving.fetch(peer, said)

    def _on_build(self, peer: Peer, said: messages.OfJob, body: bytes) -> None:
        self._receiving.build(peer, said.job)

    def _on_start(self, peer: Peer, said: messages.Start, body: bytes) -> None:
        shared, assignment = said.shared, Assignment.of(said.order, body)
        name = assignment.job
        if not shared:
            paths, blobs = replica(peer.scratch, name), replica_blobs(peer.scratch)
            trust_replica(paths, blobs)
            assignment = replace(assignment, job_root=str(paths.root), blobs=str(blobs))
            if peer.login:
                world = assignment.world.after_login(peer.login.environ, peer.login.python)
                world = peer.environment.world(world) if peer.environment else world
                assignment = replace(assignment, world=world)
                assignment = replace(assignment, plan=with_route(assignment))
                write_private(paths.plan, assignment.plan.text)
        if self._ended_early.get(name) == assignment.attempt:
            peer.channel.send({"type": "ended", "job": name, "attempt": assignment.attempt})
            return
        old = self._jobs.get(name) or left_by_another(assignment)
        if old is not None and old.attempt >= assignment.attempt:  # sent again after its channel broke
            self._jobs[name] = old
            self._follow(peer, old, said, assignment.attempt)
            return
        if old is not None:
            old.close()
        files = assignment.node_paths
        began = old is None and files.agent_events.exists()  # by an agent that died: its launcher may be on the way
        offsets = said.offsets if shared else continued(assignment.job_paths, assignment.node, said.offsets)
        job = NodeJob(assignment.job_paths, assignment.node, assignment.node_plan().ranks, assignment.attempt)
        job.events.write("node.up", agent=ProcessId.mine().to_json(), restarts=assignment.restarts)
        self._jobs[name] = job
        self._follow(peer, job, replace(said, offsets=offsets), job.attempt)
        self._changed = time.monotonic()
        self._starts.start(assignment, doubt=began)

    def _on_follow(self, peer: Peer, said: messages.Follow, body: bytes) -> None:
        """A driver takes up a job that this agent or an earlier agent started."""
        name = safe_name(said.job)
        shared = said.shared
        if not shared and self._replaced(peer, said):
            return
        job = self._jobs.get(name)
        if job is None:
            paths = JobPaths(Path(said.job_root)) if shared else replica(peer.scratch, name)
            self._jobs[name] = job = adopted(paths, said)
        self._follow(peer, job, said, said.attempt, said.blobs)

    def _follow(
        self,
        peer: Peer,
        job: NodeJob,
        said: messages.Start | messages.Follow,
        attempt: int,
        blobs: tuple[str, ...] = (),
    ) -> None:
        """``attempt``: the one that the driver knows of."""
        name, job.shared = job.paths.job, said.shared
        peer.job = name
        if not said.shared:
            self._gpus.hold(name)
        self._orphans.claimed(name)
        offsets = dict(said.offsets)
        peer.shipments[name] = Shipment(peer.channel, job.paths, job.node, said.shared, offsets, blobs, attempt)
        if (vigil := job.vigil()) and (place := vigil.lead()):
            peer.channel.send({"type": "steward", **place.to_json()})

    def _on_steward(self, peer: Peer, said: messages.Steward, body: bytes) -> None:
        if (job := self._jobs.get(said.job)) and (vigil := job.vigil()):
            vigil.join(said)

    def _on_signal(self, peer: Peer, said: messages.Signal, body: bytes) -> None:
        if job := self._jobs.get(said.job):
            job.signal(said.signal)
            self._changed = time.monotonic()

    def _on_stacks(self, peer: Peer, said: messages.OfJob, body: bytes) -> None:
        if job := self._jobs.get(said.job):
            job.say_places()

    def _on_profile(self, peer: Peer, said: messages.Profile, body: bytes) -> None:
        if job := self._jobs.get(said.job):
            job.ask_profile(said.request)

    def _on_end(self, peer: Peer, said: messages.End, body: bytes) -> None:
        if job := self._jobs.get(said.job):
            if said.attempt < job.attempt:  # of an attempt that is over: this driver has yet to hear of the next one
                return
            self._starts.withdraw(job)
            job.end(said.grace, time.monotonic())
            self._changed = time.monotonic()
        else:
            self._receiving.forget(peer)
            self._ended_early[said.job] = said.attempt
            peer.job = None
            discard(replica_paths(peer.scratch, said.job))
            peer.channel.send({"type": "ended", "job": said.job, "attempt": said.attempt})

    def _on_forget(self, peer: Peer, said: messages.OfJob, body: bytes) -> None:
        """The driver has received all data of a job that has ended."""
        job = self._jobs.get(said.job)
        if job is not None and job.state == "ended" and peer.job == said.job:
            self._remove(said.job, shipped=said.job not in peer.shipments)
        self._ended_early.pop(said.job, None)
        peer.shipments.pop(said.job, None)
        peer.job = None

    # -- jobs

    def _ship(self, name: str, job: NodeJob, now: float) -> None:
        quiet = job.quiet(now)
        for peer in list(self._peers):
            shipment = peer.shipments.get(name)
            if shipment is None:
                continue
            try:
                complete = shipment.pump()
                if complete and shipment.attempt < job.attempt:  # the nodes went on without this driver
                    peer.channel.send({"type": "ended", "job": name, "attempt": shipment.attempt})
                    shipment.attempt = job.attempt
                if complete and job.state == "ended" and shipment.send_work(job.written.going):
                    peer.channel.send({"type": "ended", "job": name, "attempt": job.attempt})
                    del peer.shipments[name]
                elif quiet:
                    peer.channel.send({"type": "quiet", "job": name, "attempt": job.attempt, "ranks": quiet})
            except ChannelError:
                self._drop(peer)
            except OSError:
                continue  # a file was removed after its directory was listed

    def _care_for_orphans(self, now: float) -> None:
        followed = {peer.job for peer in self._peers}
        for name, job in list(self._jobs.items()):
            job.hear(now, name in followed)
            self._renewals.turn(name, now, name in followed)
            if name in followed:
                self._orphans.claimed(name)
            elif job.shared and self._orphans.hopeless(job.paths, None, now):
                job.end(1.0, now)
                if job.state == "ended":
                    self._remove(name)
            elif not job.shared and job.going:
                gone = self._orphans.hopeless(job.paths, job.plan.lease, now)
                if why := f"no driver came for {job.plan.lease:g} s (--lease)\n" if gone else job.overdue(now):
                    job.end(job.plan.grace, now, why)

    def _remove(self, name: str, *, shipped: bool = False) -> None:
        """``shipped``: the driver has what the cell wrote."""
        job = self._jobs.pop(name)
        job.close(remove=not job.shared, shipped=shipped)
        self._orphans.claimed(name)
        self._starts.forget(name)
        self._changes.forget(name)
