"""Everything that can go wrong, in one tree::

    TorchDistError                  carries ``hint``: the next thing to do
    ├── UserError                   the user's code or request
    │   ├── OptionError             a misspelt option, a bad value
    │   ├── CellSyntaxError         the cell does not compile (also a SyntaxError)
    │   ├── UndefinedName           the cell needs an undefined name (also a NameError)
    │   ├── CaptureError            an object cannot leave the notebook
    │   ├── StrategyError           a strategy cannot train this cell correctly
    │   ├── CheckpointError         a checkpoint that cannot be written, or is missing, damaged or of another model
    │   ├── RankFailed              a rank failed and its own exception could not be rebuilt
    │   └── JobStalled              no rank made progress, and --stall-kill ended the job
    ├── PlatformError               this machine or its set-up
    │   ├── ResourceError           fewer GPUs, memory or disk than asked for
    │   ├── StoreError              the data directory cannot be written or read
    │   │   └── DamagedJob          a job's files were changed or lost
    │   └── JobNotFound             no such job here
    └── InfrastructureError         our own processes, the connection between them
        ├── LaunchError             the ranks could not be started
        ├── ChannelError            a connection to an agent broke, or carried invalid data
        └── JobLost                 a job's processes are gone and left no outcome
    JobCancelled (KeyboardInterrupt)  the user stopped the job
    JobTimedOut (TimeoutError)        --timeout passed

The user can fix a ``PlatformError`` or a ``UserError``; an ``InfrastructureError`` is a fault of this package.
"""

from __future__ import annotations

HINT = "\n  → "
"""Between the message of an error and its hint."""


class TorchDistError(Exception):
    """Base of all errors of this package. ``hint`` says what to do now."""

    hint: str = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        """The message without the hint. An error from a rank is rebuilt without ``__init__`` and has ``args`` only."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message}{HINT}{self.hint}" if self.hint else self.message


class UserError(TorchDistError):
    """The user's code or request."""


class OptionError(UserError):
    """An option of ``%%distribute`` does not exist, or its value is invalid."""


class CellSyntaxError(UserError, SyntaxError):
    """The cell does not compile; ``lineno`` is the line number that the user sees (the magic is line 1)."""

    def __init__(
        self, message: str, hint: str = "", *, filename: str = "", lineno: int = 0, offset: int = 0, text: str = ""
    ) -> None:
        super().__init__(message, hint)
        self.msg = message
        self.filename, self.lineno, self.offset, self.text = filename, lineno, offset, text


class UndefinedName(UserError, NameError):
    """The cell needs a name that neither it nor the notebook defines."""

    def __init__(self, message: str, hint: str = "", *, name: str = "") -> None:
        super().__init__(message, hint)
        self.name = name


class CaptureError(UserError):
    """An object cannot leave the notebook; ``path`` leads from the captured name to this object."""

    def __init__(self, message: str, hint: str = "", *, path: str = "", line: str = "") -> None:
        super().__init__(message, hint)
        self.path = path
        self.line = line


class StrategyError(UserError):
    """The strategy cannot train this model, loop or batch correctly; nothing was trained."""


class TrainingError(UserError):
    """The training itself went wrong: gradients that are not finite, or a step that differs from one device's."""


class CheckpointError(UserError):
    """A checkpoint could not be written, or is missing, damaged, or of something else."""


class RankFailed(UserError):
    """A rank failed in a way that is not a Python exception, or whose exception could not be rebuilt."""

    def __init__(self, message: str, hint: str = "", *, rank: int | None = None) -> None:
        super().__init__(message, hint)
        self.rank = rank


class JobStalled(UserError):
    """No rank made progress, so the job was ended: with ``--stall-kill``, or because no rank had begun."""


class PlatformError(TorchDistError):
    """This machine or its set-up."""


class ResourceError(PlatformError):
    """Fewer GPUs, memory or disk than asked for."""


class StoreError(PlatformError):
    """The data directory cannot be written or read."""


class DamagedJob(StoreError):
    """A job's files were changed or lost since they were written."""


class JobNotFound(PlatformError):
    """There is no job with this id or name."""


class InfrastructureError(TorchDistError):
    """Our own processes, or the connection between them."""


class LaunchError(InfrastructureError):
    """The ranks could not be started."""


class ChannelError(InfrastructureError):
    """A connection to an agent broke, or carried invalid data."""


class JobLost(InfrastructureError):
    """A job's processes are gone and left no outcome."""


class JobCancelled(KeyboardInterrupt):
    """The user stopped the job. It is a ``KeyboardInterrupt``, so that ``Run All`` stops, too."""


class JobTimedOut(TimeoutError):
    """The job ran longer than its ``--timeout``."""
