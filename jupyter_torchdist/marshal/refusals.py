"""Types of objects that are valid in one process only, with the reason. cloudpickle silently copies some of them."""

from __future__ import annotations

import io
import sys
from typing import Any

_LIBRARY = "its operators belong to this process; use custom_op, or register them in a module beside the notebook"

_SHARED = "it connects this process with processes that it starts; a multiprocessing.Manager() reaches ranks, too"

_WORDS: tuple[tuple[str, str, str], ...] = (
    ("asyncio.events", "AbstractEventLoop", "a running event loop belongs to this process"),
    ("asyncio", "Future", "a task or future belongs to this process's event loop"),
    ("threading", "Thread", "a thread cannot leave its process"),
    ("subprocess", "Popen", "a process handle is only valid in the process that started it"),
    ("multiprocessing.process", "BaseProcess", "a process handle is only valid in the process that started it"),
    ("multiprocessing.synchronize", "SemLock", _SHARED),
    ("multiprocessing.queues", "Queue", _SHARED),
    ("multiprocessing.queues", "SimpleQueue", _SHARED),
    ("multiprocessing.sharedctypes", "SynchronizedBase", _SHARED),
    ("multiprocessing.synchronize", "Event", _SHARED),
    ("multiprocessing.synchronize", "Condition", _SHARED),
    ("multiprocessing.connection", "Connection", _SHARED),
    ("concurrent.futures", "Executor", "a pool of workers belongs to this process"),
    ("socket", "socket", "a socket is a connection of this process"),
    ("sqlite3", "Connection", "a database connection belongs to this process"),
    ("sqlite3", "Cursor", "a database cursor belongs to this process's connection"),
    ("torch.cuda", "Stream", "a CUDA stream belongs to this process"),
    ("torch.cuda", "Event", "a CUDA event belongs to this process"),
    ("torch.distributed", "ProcessGroup", "a process group belongs to this process"),
    ("torch.library", "Library", _LIBRARY),
    (
        "torch.jit",
        "ScriptModule",
        "TorchScript cannot be pickled; torch.jit.save() and torch.jit.load() carry it through a file",
    ),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "a DataLoader's iterator holds the workers of this process"),
    ("IPython.core.interactiveshell", "InteractiveShell", "the IPython shell stays in the notebook"),
    ("ipykernel.kernelbase", "Kernel", "the kernel stays in the notebook"),
    ("ipywidgets.widgets.widget", "Widget", "a widget is connected to this notebook's browser"),
)


def reason(kind: type) -> str | None:
    """Why no object of the type can leave this process, or None."""
    if issubclass(kind, io.IOBase) and not issubclass(kind, (io.BytesIO, io.StringIO)):
        return "an open file belongs to this process"
    if kind is memoryview:
        return "a memoryview is a window on memory of this process"
    for module, name, words in _WORDS:
        base: Any = getattr(sys.modules.get(module), name, None)
        if isinstance(base, type) and issubclass(kind, base):
            return words
    return None
