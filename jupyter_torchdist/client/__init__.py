"""Starts jobs from any Python process. The driver is a separate process; its code is never imported here."""

from .functions import Distributed, distributed, launch, options_of
from .job import Brought, Job, attach
from .submit import PreparedJob, Request, prepare, rerun, submit

__all__ = [
    "Brought",
    "Distributed",
    "Job",
    "PreparedJob",
    "Request",
    "attach",
    "distributed",
    "launch",
    "options_of",
    "prepare",
    "rerun",
    "submit",
]
