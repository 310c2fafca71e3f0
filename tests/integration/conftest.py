"""One kernel for the tests of a module that leave it as they found it: a kernel takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook


@pytest.fixture(scope="module")
def module_kernel(shared_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel of the module, the extension loaded; ``one_kernel`` prepares it for a test."""
    directory = tmp_path_factory.mktemp("notebook")
    environ = {"TORCHDIST_RUNTIME_DIR": str(shared_runtime), "TORCHDIST_SCRATCH": str(shared_runtime / "scratch")}
    with Notebook(directory, environ) as notebook:
        yield notebook.load()


@pytest.fixture
def one_kernel(module_kernel: Notebook, home: Path) -> Notebook:
    """The module's kernel without names, its jobs in this test's data directory."""
    module_kernel.run("%reset -f")
    module_kernel.run(f"import os\nos.environ['TORCHDIST_HOME'] = {str(home)!r}\ndel os")
    return module_kernel
