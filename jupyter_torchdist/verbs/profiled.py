"""``%dist profile JOB``: on what the ranks spend a step, and where the timeline is."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from ..client import profiles
from ..client.job import Job, attach
from ..client.profiles import Profile
from ..protocol.errors import UserError
from ..views import profile_text


def profile(arguments: argparse.Namespace) -> Profile:
    """Profile a running job. Of one that has ended: the latest profile, if it has one. Raises ``TorchDistError``."""
    job = attach(arguments.job)
    if arguments.out is not None and (arguments.out.is_dir() or not arguments.out.parent.is_dir()):
        raise UserError(f"--out {arguments.out} cannot be a file", "name a file in a directory that exists")
    asks = arguments.steps is not None or not job.state.final
    found = None if asks else profiles.last(job)
    if found is None:
        steps = profiles.STEPS if arguments.steps is None else arguments.steps
        found = profiles.take(job, steps, profiles.WITHIN if arguments.within is None else arguments.within)
    return _copied(found, arguments.out) if arguments.out is not None and found.path else found


def text(found: Profile) -> str:
    """For people."""
    return profile_text.profile(found.ranks, found.path)


def at_its_end(job: Job) -> str:
    """What ``--profile`` has found, once the job has ended; empty without the option."""
    found = profiles.last(job, least=0) if job.spec.options.profile else None
    return f"{text(found)}\n" if found else ""


def _copied(found: Profile, path: Path) -> Profile:
    try:
        shutil.copyfile(found.path, path)
    except OSError as error:
        raise UserError(f"the timeline cannot be written to {path}: {error}", "name another file") from error
    return replace(found, path=str(path.absolute()))
