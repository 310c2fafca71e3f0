"""Training loops over a DataLoader: whole batches at first, then, once that is proved to be the same, a part a rank."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ...protocol.errors import StrategyError
from ..autolog import is_users
from .agreement import of_every_rank
from .alike import check_alike, fingerprint
from .divided import Added
from .divisors import form_of
from .drawing import OwnNumbers, WorkerSeeds, draws, loads
from .places import ByLoop, Place
from .resuming import Resuming
from .shares import Rows as Share
from .shares import tensors_in, to_device
from .unseen import LinesRun, unseen_use
from .watching import LoopWatch


class Parts:
    """In place of a loader's batch sampler: the indices of each batch, or this rank's share of them.

    ``sliced`` is what the loader of the next iteration is to do; ``drawn`` tells of each batch, in order, how many
    samples it has in all, and whether it is a share. The samples of a share are loaded with numbers of the rank's
    own, until ``loaded``: a rank with a row more draws more of them, and the next epoch would be shuffled otherwise.
    """

    def __init__(self, sampler: Any, group: dist.ProcessGroup, own: OwnNumbers | None) -> None:
        self._sampler, self._group, self._own = sampler, group, own
        self.sliced = False
        self.drawn: deque[tuple[int, bool]] = deque()

    def forget(self, count: int) -> None:
        """The first ``count`` batches that were drawn are given to nobody."""
        for _ in range(count):
            self.drawn.popleft()

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._sampler:
            indices = list(batch)
            sliced = self.sliced and len(indices) >= self._group.size()
            self.drawn.append((len(indices), sliced))
            if sliced and self._own is not None:
                self._own.begin()
            yield indices[Share(len(indices), self._group).mine] if sliced else indices
            self.loaded()

    def loaded(self) -> None:
        """The samples are there: the common numbers again."""
        if self._own is not None:
            self._own.end()

    def __len__(self) -> int:
        return len(self._sampler)


@dataclass(frozen=True)
class Joint:
    """How the losses of a loop are joined; ``forms`` are those that were judged, None for any."""

    losses: Added
    forms: set[tuple[str, ...]] | None


class Loops:
    """What is known of a job's training loops. ``sliced`` is the batch in flight, when it is a part."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        say: Callable[[str], None],
        device: torch.device,
        steps: Resuming,
        *,
        batch: str = "auto",
        loss: str = "auto",
    ) -> None:
        """``loss``: auto, or how the user says that it joins the samples, mean or sum: then it is not judged."""
        self._group, self._say, self._device, self._batch = group, say, device, batch
        self._steps = steps
        self._shadows: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = weakref.WeakKeyDictionary()
        self._decided: ByLoop[Joint | None] = ByLoop()
        self._told: set[str] = set()
        self._asserted = Joint(Added(mean=loss != "sum"), None)
        self._claimed = loss != "auto"
        self.watch: LoopWatch | None = None
        self.sliced: Share | None = None
        self.samples: int | None = None
        """Of the batch in flight, where that is known."""
        self.joint: Joint | None = None

    def joint_of(self, loss: torch.Tensor) -> tuple[Added, Share]:
        """How the ranks' losses are joined while parts are in flight, and this rank's part.

        Raises ``StrategyError`` for another kind of loss than those that were judged.
        """
        assert self.sliced is not None and self.joint is not None
        forms = self.joint.forms
        if forms is not None and form_of(loss) not in forms:
            raise StrategyError(
                "the loss of this loop is another one than in the steps that were watched",
                "-O batch=whole gives every rank the whole batch, and any loss is right",
            )
        return self.joint.losses, self.sliced

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is done within is not the loop's own."""
        watch, self.watch = self.watch, None
        try:
            if watch is None:
                yield
            else:
                with watch.aside():
                    yield
        finally:
            self.watch = watch

    def iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        """``iter(loader)`` of user code."""
        frame = self._users_frame()
        # Batches that no sampler draws in order are cut in the forward.
        drawn = loader.batch_sampler is not None and getattr(loader, "in_order", True)
        if frame is not None and torch.is_grad_enabled():
            divided = self._group.size() > 1 and drawn
            return self._batches(original, loader, frame) if divided else self._whole(original, loader, frame)
        return original(loader) if self._device.type == "cpu" else self._moved(original, loader)

    def _whole(self, original: Callable[..., Any], loader: DataLoader[Any], frame: FrameType) -> Iterator[Any]:
        try:
            with self._steps.loop(loader, loader, frame):
                for batch in self._moved(original, loader):
                    self._steps.begins_step()
                    self.samples = _samples_of(batch)
                    yield batch
                    self.samples = None
                    self._steps.ends_step()
        finally:
            self.samples = None

    def _moved(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Iterator[Any]:
        for batch in original(loader):
            yield to_device(batch, self._device)

    def _batches(self, original: Callable[..., Any], loader: DataLoader[Any], frame: FrameType) -> Iterator[Any]:
        shadow = self._shadow(loader)
        parts: Parts = shadow.batch_sampler  # type: ignore[assignment]
        site = (loader, Place.of(frame))
        if self._batch == "whole":
            self._decided[site] = None
        elif self._batch == "slices":
            self._decided[site] = self._asserted
        parts.drawn.clear()
        parts.sliced = self._decided.get(site) is not None
        if parts.sliced:
            shadow.__dict__["worker_init_fn"] = WorkerSeeds(loader.worker_init_fn, self._group.rank())
        watch = (
            None
            if site in self._decided
            else LoopWatch(self._constants(loader), self._asserted.losses if self._claimed else None)
        )
        run = LinesRun(frame)
        try:
            with self._steps.loop(loader, shadow, frame):
                inner = iter(original(shadow))
                parts.loaded()
                parts.forget(self._steps.passed(shadow))
                for loaded in loads(inner, parts.loaded):
                    self._steps.begins_step()
                    batch = to_device(loaded, self._device)
                    total, sliced = parts.drawn.popleft()
                    self.samples = total
                    self.sliced = Share(total, self._group) if sliced else None
                    self.joint = self._decided.get(site)
                    if watch is not None and not sliced:
                        self._begin(watch, run, batch, total)
                        yield batch
                        self.watch = None
                        run.stop()
                        watch.end()
                        if watch.done:
                            self._decide(site, watch, run, frame)
                            parts.sliced = self._decided.get(site) is not None
                            watch = None
                    else:
                        yield batch
                    self.sliced = self.samples = None
                    self._steps.ends_step()
        finally:
            run.stop()
            if watch is not None:
                watch.end()
            self.watch = self.sliced = self.samples = None

    def _begin(self, watch: LoopWatch, run: LinesRun, batch: Any, total: int) -> None:
        if not all(tensor.dim() and tensor.size(0) == total for tensor in tensors_in(batch)):
            watch.object("not everything in a batch has its samples in the first dimension")
        watch.seen = watch.seen or fingerprint(batch)
        watch.begin(batch, total)
        self.watch = watch
        if not run.start():
            watch.object("a debugger is at work")

    def _decide(self, site: Any, watch: LoopWatch, run: LinesRun, frame: FrameType) -> None:
        """What all ranks find; they have seen the same."""
        reason = watch.reason or unseen_use(run, frame)
        found = of_every_rank((reason, watch.seen), self._group)
        check_alike([seen for _, seen in found], "data in the first batch of a loop")
        reason = next((one for one, _ in found if one), None)
        self._decided[site] = (
            None if reason or watch.losses is None else Joint(watch.losses, None if self._claimed else watch.forms)
        )
        if reason:
            self._tell(f"every rank loads whole batches, as {reason}; -O batch=slices gives each its part alone")
        else:
            self._tell("each rank loads its part of every batch")

    def _tell(self, line: str) -> None:
        """Once: a loader that is made anew in every epoch is a loop of its own each time."""
        if line not in self._told:
            self._told.add(line)
            self._say(line)

    def _shadow(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A loader that shares everything with the user's but its batch sampler (and persistent workers)."""
        shadow = self._shadows.get(loader)
        if shadow is None:
            shadow = self._shadows[loader] = copy.copy(loader)
            parts = Parts(loader.batch_sampler, self._group, OwnNumbers(self._group.rank()) if draws(loader) else None)
        else:
            parts = shadow.batch_sampler  # type: ignore[assignment]
            kept = shadow.__dict__.get("_iterator")
            shadow.__dict__.update(loader.__dict__)
            shadow.__dict__["_iterator"] = kept
        shadow.__dict__["batch_sampler"] = parts
        return shadow

    def _constants(self, loader: DataLoader[Any]) -> tuple[float, ...]:
        lengths = []
        for thing in (loader, loader.dataset):
            try:
                lengths.append(float(len(thing)))  # type: ignore[arg-type]
            except (TypeError, NotImplementedError):
                continue
        return tuple(lengths)

    def _users_frame(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame


def _samples_of(batch: Any) -> int | None:
    """Where all tensors agree in it."""
    sizes = {tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None
