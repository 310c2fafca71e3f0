"""From a specification to a running job, from any Python: it spawns the driver and never imports one."""

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
