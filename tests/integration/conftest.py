"""What takes seconds to start and is shared: the agent with its warm processes, a kernel for the tests of a module."""

from __future__ import annotations

import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.protocol.wire.connect import connect_agent
from tests.notebook import Notebook


@pytest.fixture(scope="session")
def connections(shared_runtime: Path) -> Iterator[list[socket.socket]]:
    """The connection that keeps the agent of this session, in a list of one."""
    held: list[socket.socket] = []
    yield held
    for connection in held:
        connection.close()


@pytest.fixture(autouse=True)
def agent_stays(home: Path, connections: list[socket.socket]) -> None:
    """Between two tests on a busy machine an idle agent would end, and the next one would import torch anew."""
    held = connections[:]
    connections[:] = [connect_agent(sys.executable)]
    for connection in held:
        connection.close()


@pytest.fixture(scope="module")
def module_kernel(shared_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel of the module, the extension loaded; ``one_kernel`` prepares it for a test."""
    directory = tmp_path_factory.mktemp("notebook")
    places = {"TORCHDIST_SCRATCH": str(shared_runtime / "scratch"), "TORCHDIST_QUEUE": str(shared_runtime / "queue")}
    environ = {"TORCHDIST_RUNTIME_DIR": str(shared_runtime), **places}
    with Notebook(directory, environ) as notebook:
        yield notebook.load()


@pytest.fixture
def one_kernel(module_kernel: Notebook, home: Path) -> Notebook:
    """The module's kernel without names, its jobs in this test's data directory."""
    module_kernel.run("%reset -f")
    module_kernel.run(f"import os\nos.environ['TORCHDIST_HOME'] = {str(home)!r}\ndel os")
    return module_kernel


@pytest.fixture
def notebook(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of a notebook: ``__main__`` of this process for the length of the test. Drivers end with it."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    yield main.__dict__
    pool().close()
