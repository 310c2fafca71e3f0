"""The quickstart on hosts: ``notebooks/hosts.ipynb`` differs from it by ``--hosts`` alone, and runs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cluster import node_python
from tests.cluster.cluster import Cluster
from tests.integration.test_notebooks import NOTEBOOK, briefly, check_executed

ON_HOSTS = NOTEBOOK.with_name("hosts.ipynb")
PLACE = "--ranks 3 --hosts node1,node2,node3"

pytestmark = pytest.mark.timeout(240)


def sources(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_the_only_change_is_where_it_runs() -> None:
    assert sources(ON_HOSTS) == [source.replace("--ranks 2", PLACE) for source in sources(NOTEBOOK)]


def test_it_runs(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "torchdist.toml").write_text(f'[hosts]\npython = "{node_python.PLACE}/bin/python"\n')
    notebook = nbformat.reads(briefly(ON_HOSTS.read_text(encoding="utf-8")), as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    check_executed(notebook)
