"""The routes and their handlers. All requests and responses are JSON in the form of ``protocol.codec``.

======  ==============================  ===========================================================================
        below ``torchdist/api/``        gives
======  ==============================  ===========================================================================
GET     jobs                            now, jobs [row], the newest first
GET     jobs/ID                         now, job, spec, plan, state, effective, receipt, notes (409: damaged),
                                        command (the shell command that runs the job again)
POST    jobs/ID/cancel                  said; the request is ``{kill: bool}``
POST    jobs/ID/rerun                   job: the id of the new job
DELETE  jobs/ID                         nothing (204)
GET     jobs/ID/files/RANK.STREAM       the file as a download
WS      jobs/ID/feed                    the messages of ``protocol/feed.py``
POST    jobs/ID/turn                    messages [of the feed]; the request is ``{messages: [of the view]}``
WS      jobs/feed                       messages ``jobs`` (now, jobs [row]), later ``changes`` (now, jobs [row], gone
                                        [ID]), or ``trouble`` (now, message, hint): the server tries again
======  ==============================  ===========================================================================

A *row* is ``listing.Row``. An error has a status and ``{message, hint}``: 400 invalid request, 403, 404 no such job
or file, 409 impossible in the job's current state, 503 the data directory cannot be read or written.
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
