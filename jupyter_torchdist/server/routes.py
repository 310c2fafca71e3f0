"""Which address leads where. All answers and questions are JSON in the form of ``protocol.codec``.

======  ==============================  ===========================================================================
        below ``torchdist/api/``        gives
======  ==============================  ===========================================================================
GET     jobs                            now, jobs [row], the newest first
GET     jobs/ID                         now, job, spec, plan, state, effective, receipt, notes (409: damaged),
                                        command (what one types to run it again in a shell)
POST    jobs/ID/cancel                  said; asked with ``{kill: bool}``
POST    jobs/ID/rerun                   job: the id of the new one
DELETE  jobs/ID                         nothing (204)
GET     jobs/ID/files/RANK.STREAM       the file, to be saved
WS      jobs/ID/feed                    what ``protocol/feed.py`` says
POST    jobs/ID/turn                    messages [what the feed says]; asked with ``{messages: [what a view says]}``
WS      jobs/feed                       messages of ``jobs`` (now, jobs [row]), later ``changes`` (now, jobs [row], gone
                                        [ID]), or ``trouble`` (now, message, hint): it is tried again; nothing is asked
======  ==============================  ===========================================================================

A *row* is ``listing.Row``. An error is its status with ``{message, hint}``: 400 a question that makes no sense, 403,
404 no such job or file, 409 not as the job stands now, 503 the data directory cannot be read or written.
"""

from __future__ import annotations

import re

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.utils import url_path_join
from tornado.web import Application

from ..protocol.paths import home
from . import jobs, sockets, turn
from .base import SETTING
from .listing import Listing

ROOT = "torchdist/api"

_JOB = "jobs/(?P<job>[^/]+)"

ROUTES: tuple[tuple[str, type[JupyterHandler]], ...] = (
    ("jobs", jobs.Jobs),
    ("jobs/feed", sockets.JobsSocket),
    (_JOB, jobs.OneJob),
    (f"{_JOB}/feed", sockets.FeedSocket),
    (f"{_JOB}/turn", turn.Turn),
    (f"{_JOB}/cancel", jobs.Cancel),
    (f"{_JOB}/rerun", jobs.Rerun),
    (f"{_JOB}/files/(?P<name>[^/]+)", jobs.File),
)


def install(app: Application) -> None:
    """Add the routes to a Jupyter server's application, below its base URL."""
    app.settings[SETTING] = Listing(home())
    base = re.escape(app.settings["base_url"])
    app.add_handlers(".*$", [(url_path_join(base, ROOT, route), handler) for route, handler in ROUTES])
