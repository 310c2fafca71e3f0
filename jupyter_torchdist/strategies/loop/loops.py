"""Training loops over a DataLoader: whole batches at first; a part a rank when this is proved to give the same result.

Several loops may run at once, nested or side by side (``zip(labelled, unlabelled)``). The batch that was given last is
the current one, until its loop is asked for the next batch. Batches of the loops around it are whole.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ...protocol.errors import StrategyError
from ...usercode.frames import users_frame
from ..analysis.divisors import form_of
from ..core.agreement import of_every_rank
from ..core.proving import Proving
from ..core.scatter import BatchShard as Share
from ..core.scatter import others_in, tensors_in, to_device
from ..step.batch_consistency import check_alike, fingerprint
from ..step.ways import AddedParts
from .collating import Collate, loads_batches
from .line_tracer import LinesRun
from .loop_part import Drawing, LoopPart
from .loss_scaling import values_of
from .places import ByLoop, LoopSite
from .sampler_rng import Drawn, OwnNumbers, WatchedWorkers, WorkerSeeds, draws, loads
from .steps import Steps
from .unexecuted import unchecked, unseen_use
from .watching import LoopWatch


@dataclass(frozen=True)
class Joint:
    """How the losses of a loop are joined. ``forms``: the forms of loss that were judged; None: any form."""

    losses: AddedParts
    forms: set[tuple[str, ...]] | None


@dataclass(eq=False)
class Flight:
    """A batch that a loop has given, until the loop is asked for its next one."""

    samples: int | None
    share: Share | None = None
    joint: Joint | None = None
    watch: LoopWatch | None = None
    run: LinesRun | None = None

    def pause(self) -> None:
        """Another batch becomes the current one."""
        if self.watch is not None and self.run is not None:
            self.run.stop()
            self.watch.pause()

    def resume(self) -> None:
        if self.watch is not None and self.run is not None:
            self.watch.resume()
            if not self.run.start():
                self.watch.object("a debugger is at work")


class Loops:
    """What is known of a job's training loops. ``sliced`` is this rank's share of the current batch, if divided."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        say: Callable[[str], None],
        device: torch.device,
        steps: Steps,
        proving: Proving,
        *,
        batch: str = "auto",
        loss: str = "auto",
    ) -> None:
        """``loss``: auto, or how the user says that it joins the samples (mean or sum); then it is not judged."""
        self._group, self._say, self._device, self._batch = group, say, device, batch
        self._steps, self._proving = steps, proving
        self._shadows: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = weakref.WeakKeyDictionary()
        self._decided: ByLoop[Joint | None] = ByLoop()
        self._told: set[str] = set()
        self._asserted = Joint(AddedParts(mean=loss != "sum"), None)
        self._claimed = loss != "auto"
        self._flights: list[Flight] = []
        self._shown: Flight | None = None
        self.watch: LoopWatch | None = None
        self.sliced: Share | None = None
        self.samples: int | None = None
        """Number of samples of the current batch, if known."""
        self.joint: Joint | None = None
        self._untold: int | None = None
        """Samples of the batch that was given last, until ``taken``."""

    def taken(self) -> int | None:
        """Samples of the latest batch, once; None: unknown, or told before."""
        untold, self._untold = self._untold, None
        return untold

    def backward(self, losses: Sequence[torch.Tensor]) -> None:
        """User code calls ``backward`` on ``losses``: judge whether each rank may have its part of the batches.

        Raises ``StrategyError`` if a batch other than the current one is divided already.
        """
        if any(around.share is not None for around in self._flights[:-1]):
            gc.collect()  # a function that has returned within its loop: its frame and the loop refer to each other
        for around in self._flights[:-1]:
            if around.share is not None:
                raise StrategyError(
                    "a step uses batches of two loops, and each rank has only its part of the outer loop's batch: no "
                    "step that was checked at the start used two",
                    "-O batch=whole gives every rank whole batches",
                )
            if around.watch is not None:
                around.watch.object("a step uses batches of two loops")
        if self.watch is not None:
            self.watch.backward(losses, [value for loss in losses for value in values_of(loss)])

    def joint_of(self, loss: torch.Tensor) -> tuple[AddedParts, Share]:
        """How the ranks' losses are joined while the current batch is divided, and this rank's part.

        Raises ``StrategyError`` for a form of loss that was not judged.
        """
        assert self.sliced is not None and self.joint is not None
        forms = self.joint.forms
        if forms is not None and form_of(loss) not in forms:
            raise StrategyError(
                "the loss of this loop is computed in another way than in the steps that were checked at the start",
                "-O batch=whole gives every rank the whole batch, so any loss is correct",
            )
        return self.joint.losses, self.sliced

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """A context whose operations do not count as operations of the loop."""
        return _NOTHING if self.watch is None else self._unwatched(self.watch)

    @contextlib.contextmanager
    def _unwatched(self, watch: LoopWatch) -> Iterator[None]:
        self.watch = None
        try:
            with watch.aside():
                yield
        finally:
            self.watch = watch

    def iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        """``iter(loader)`` of user code."""
        frame = self._users_frame()
        # If no sampler draws the batches in order, they are divided in the forward.
        listed = loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)
        drawn = listed and getattr(loader, "in_order", True)
        # A thread that prefetches is not in a step of the cell.
        in_order = threading.current_thread() is threading.main_thread()
        if frame is not None and in_order and torch.is_grad_enabled():
            divided = self._group.size() > 1 and drawn
            batches = self._batches(original, loader, frame) if divided else self._whole(original, loader, frame)
            next(batches)  # as on one device: iter() draws numbers and starts workers before the first batch
            return batches
        return original(loader) if self._device.type == "cpu" else self._moved(iter(original(loader)))

    def _whole(self, original: Callable[..., Any], loader: DataLoader[Any], frame: FrameType) -> Iterator[Any]:
        flight: Flight | None = None
        try:
            with self._steps.loop(loader, loader, frame):
                inner = iter(original(loader))
                yield
                for loaded in inner:
                    self._steps.begins_step()
                    batch = to_device(loaded, self._device)
                    flight = self._given(Flight(_samples_of(batch)))
                    yield batch
                    self._over(flight)
                    self._steps.ends_step()
        finally:
            self._over(flight)

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield to_device(batch, self._device)

    def _batches(self, original: Callable[..., Any], loader: DataLoader[Any], frame: FrameType) -> Iterator[Any]:
        shadow = self._shadow(loader)
        parts: LoopPart = shadow.batch_sampler  # type: ignore[assignment]
        site = (loader, LoopSite.of(frame))
        if self._batch == "whole":
            self._decided[site] = None
        elif self._batch == "slices":
            self._decided[site] = self._asserted
        drawing = parts.drawing = Drawing(sliced=self._decided.get(site) is not None)
        watch = None if site in self._decided else self._watch(loader)
        collate = shadow.collate_fn
        if drawing.sliced:
            shadow.__dict__["worker_init_fn"] = WorkerSeeds(loader.worker_init_fn, self._group.rank())
        elif watch is not None and isinstance(collate, Collate):
            shadow.__dict__["worker_init_fn"] = WatchedWorkers(loader.worker_init_fn, collate.drawing)
        run = LinesRun(frame)
        flight: Flight | None = None
        proving = contextlib.ExitStack()
        if watch is not None:
            proving.enter_context(self._proving)
        try:
            with proving, self._steps.loop(loader, shadow, frame):
                inner = iter(original(shadow))
                parts.loaded()
                drawing.forget(self._steps.passed(shadow))
                yield
                for loaded in loads(inner, parts.loaded):
                    self._steps.begins_step()
                    values, objection = loaded if isinstance(collate, Collate) else (loaded, None)
                    batch = to_device(values, self._device)
                    total, sliced = drawing.batches.popleft()
                    flight = Flight(total, Share(total, self._group) if sliced else None, self._decided.get(site))
                    if watch is not None and not sliced:
                        if objection is not None:
                            watch.object(objection)
                        _watched(watch, batch, total)
                        flight.watch, flight.run = watch, run
                    self._given(flight)
                    yield batch
                    self._over(flight)
                    if watch is not None and watch.done:
                        self._decide(site, watch, run, frame)
                        drawing.sliced = self._decided.get(site) is not None
                        watch = None
                        proving.close()
                    self._steps.ends_step()
        finally:
            self._over(flight)

    def _given(self, flight: Flight) -> Flight:
        """A loop gives a batch, which becomes the current one."""
        self._flights.append(flight)
        self._untold = flight.samples
        self._show()
        return flight

    def _over(self, flight: Flight | None) -> None:
        """The loop asks for its next batch, or ends: the batch of the loop around it is the current one again."""
        if flight in self._flights:
            self._flights.remove(flight)
            self._show()
            if flight.watch is not None:
                flight.watch.end()

    def _show(self) -> None:
        flight = self._flights[-1] if self._flights else None
        if flight is self._shown:
            return
        if self._shown is not None:
            self._shown.pause()
        self._shown = flight
        if flight is None:
            self.watch = self.sliced = self.samples = self.joint = None
            return
        self.watch, self.sliced, self.samples, self.joint = flight.watch, flight.share, flight.samples, flight.joint
        flight.resume()

    def _decide(self, site: Any, watch: LoopWatch, run: LinesRun, frame: FrameType) -> None:
        """Decide with all ranks, after checking that they have seen the same data."""
        reason = watch.reason or unseen_use(run, frame)
        found = of_every_rank((reason, watch.seen), self._group)
        check_alike([seen for _, seen in found], "data in the first batch of a loop")
        reason = next((one for one, _ in found if one), None)
        self._decided[site] = (
            None if reason or watch.losses is None else Joint(watch.losses, None if self._claimed else watch.forms)
        )
        if reason:
            self._tell(
                f"every rank loads whole batches, because {reason}; -O batch=slices gives each rank only its part"
            )
        else:
            self._tell("each rank loads its part of every batch")
        for line in unchecked(run):
            self._tell(line)

    def _tell(self, line: str) -> None:
        """Say a line once: a loader that is built again in every epoch is a new loop each time."""
        if line not in self._told:
            self._told.add(line)
            self._say(line)

    def _shadow(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A copy of the user's loader with another batch sampler and ``collate_fn``, and its own persistent workers."""
        shadow = self._shadows.get(loader)
        if shadow is None:
            shadow = self._shadows[loader] = copy.copy(loader)
            collate = loader.collate_fn
            parts = LoopPart(
                loader.batch_sampler, self._group, OwnNumbers(self._group.rank()) if draws(loader) else None
            )
        else:
            parts = shadow.batch_sampler  # type: ignore[assignment]
            kept, collate = shadow.__dict__.get("_iterator"), shadow.collate_fn
            shadow.__dict__.update(loader.__dict__)
            shadow.__dict__["_iterator"] = kept
        shadow.__dict__["batch_sampler"] = parts
        shadow.__dict__["collate_fn"] = collate = self._collate(loader, collate)
        if isinstance(collate, Collate) and not loader.num_workers:
            parts.loads = collate.begins
        return shadow

    def _collate(self, loader: DataLoader[Any], before: Callable[[list[Any]], Any]) -> Callable[..., Any]:
        """The replacement for the user's collate function; ``before``: the one of the last iteration."""
        own = loader.collate_fn
        if not draws(loader):
            return own
        if isinstance(before, Collate) and before.own is own:
            return before
        return Collate(own, self._group.rank(), self._group.size(), Drawn(loader.dataset, own))

    def _watch(self, loader: DataLoader[Any]) -> LoopWatch:
        watch = LoopWatch(self._constants(loader), self._asserted.losses if self._claimed else None)
        if (why := loads_batches(loader.dataset)) is not None:
            watch.object(why)
        return watch

    def _constants(self, loader: DataLoader[Any]) -> tuple[float, ...]:
        lengths = []
        for thing in (loader, loader.dataset):
            try:
                lengths.append(float(len(thing)))  # type: ignore[arg-type]
            except (TypeError, NotImplementedError):
                continue
        return tuple(lengths)

    def _users_frame(self) -> FrameType | None:
        return users_frame(sys._getframe(2))


_NOTHING = contextlib.nullcontext()
"""One object for all: most steps are not watched, and each needs three such contexts."""


def _watched(watch: LoopWatch, batch: Any, total: int) -> None:
    """A watched step is about to begin."""
    if not all(tensor.dim() and tensor.size(0) == total for tensor in tensors_in(batch)):
        watch.object("not everything in a batch has its samples in the first dimension")
    if any(other is not None for other in others_in(batch)):
        watch.object("not everything in a batch is a tensor, so its number of samples is unknown")
    watch.seen = watch.seen or fingerprint(batch)
    watch.begin(batch, total)


def _samples_of(batch: Any) -> int | None:
    """The number of samples, if all tensors have the same."""
    sizes = {tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None
