"""Shows a job that no cell waits for: its view is drawn by a thread, until the job ends."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..client.job import Job, attach_to
from ..protocol.errors import TorchDistError
from ..protocol.paths import Home
from ..views import failure_text
from . import show
from .rich import RichOutput

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LOOK = 0.2
"""Seconds between two looks at a job."""


def watch(ip: InteractiveShell, job: Job) -> bool:
    """Show the job below this cell and return at once. False where an output cannot be updated (terminal, text).

    Rich output of rank 0 would appear below whatever cell runs then. It is in the logs, as that of other ranks is.
    """
    rich = RichOutput(ip, job.paths, visible=False)
    picture = show.watch(ip, job.paths, job.spec.options.watch, rich, job.manifest.notes)
    if not isinstance(picture, show.Picture):
        return False
    picture.tick(job.state)
    job.revive()
    # An own ``Job``: the user's may be used by a cell at the same time.
    own = attach_to(job.paths, Home(job.paths.root.parent.parent))
    threading.Thread(target=_draw, args=(own, picture), name=f"torchdist {job.id}", daemon=True).start()
    return True


def _draw(job: Job, picture: show.Picture) -> None:
    try:
        while not (state := job.state).final:
            picture.tick(state)
            job.revive()
            time.sleep(LOOK)
        remarks = failure_text.lost_lines(state)
        if job.plan.out != ("none",) and job.paths.result(0).exists():
            remarks.append(f"its values are still with the job: `td.attach({job.id!r}).bring()` brings them")
        picture.finish(state, tuple(remarks))
    except (TorchDistError, OSError):  # the job's files were deleted: the picture stays as it was
        return
