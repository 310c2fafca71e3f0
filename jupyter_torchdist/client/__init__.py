"""Starts jobs from any Python process. The driver is a separate process; its code is never imported here."""

from .job import Brought, Job, attach
from .submit import PreparedJob, Request, prepare, rerun, submit

__all__ = [
    "Brought",
    "Job",
    "PreparedJob",
    "Request",
    "attach",
    "prepare",
    "rerun",
    "submit",
]
