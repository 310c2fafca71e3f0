"""A cell and what it needs from the notebook, as a bundle. Knows no IPython::

    capture_cell(source, label, first_line, namespace, *, exclude=(), flags=0, cwd, labels=None) -> Capture
    capture_call(function, args, kwargs, *, cwd, labels=None) -> Capture
        captured as the name CALL = "__torchdist_call__": (function, args, kwargs)
    packages(capture) -> tuple[Package, …]
    installed() -> {distribution: version}
    pack(capture, job, put: Callable[[bytes | memoryview], Blob]) -> Manifest

    Capture.names, .receipt (Captured…), .notes, .bound, .memo {place: object}, .size (bytes), .flags

``labels`` renames the source files of earlier cells: co_filename → ``Cell In[3]``. Raises ``CellSyntaxError``,
``UndefinedName``, ``CaptureError``. ``Capture.memo`` goes to ``marshal.load_results``; it keeps the captured
objects alive, so drop the capture when the job's results have been loaded.
"""

from __future__ import annotations

from .cell import CALL, Capture, capture_call, capture_cell
from .flow import Names
from .names import analyse
from .pack import pack
from .packages import installed, packages

__all__ = ["CALL", "Capture", "Names", "analyse", "capture_call", "capture_cell", "installed", "pack", "packages"]
