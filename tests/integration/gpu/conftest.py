"""Each test twice: on GPUs (marked ``gpu``), and on CPUs (``soak``), where it is tried without any."""

from __future__ import annotations

import pytest

from tests import places
from tests.places import ALL_GPUS, CPU, CPUS, GPU, GPUS, Place

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
ON_GPUS = [pytest.mark.gpu, pytest.mark.skipif(len(GPUS) < 2, reason="needs two CUDA devices")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As long as the cells may take; each step of ``scripts/gpu_check`` has a limit of its own."""
    for item in items:
        if "integration/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.timeout(places.PATIENCE + 60))


@pytest.fixture(
    params=[pytest.param(GPU, id="cuda", marks=ON_GPU), pytest.param(CPU, id="cpu", marks=pytest.mark.soak)]
)
def one(request: pytest.FixtureRequest) -> Place:
    """One rank on one device."""
    place: Place = request.param
    return place


@pytest.fixture(
    params=[pytest.param(ALL_GPUS, id="cuda", marks=ON_GPUS), pytest.param(CPUS, id="cpu", marks=pytest.mark.soak)]
)
def several(request: pytest.FixtureRequest) -> Place:
    """A rank on every GPU, or two on CPUs."""
    place: Place = request.param
    return place


@pytest.fixture(
    params=[pytest.param(ALL_GPUS, id="cuda", marks=ON_GPU), pytest.param(CPUS, id="cpu", marks=pytest.mark.soak)]
)
def most(request: pytest.FixtureRequest) -> Place:
    """A rank on every GPU, be it one, or two on CPUs."""
    place: Place = request.param
    return place
