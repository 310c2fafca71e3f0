"""The agent stays warm between two cases, as in ``tests/integration``."""

from tests.integration.conftest import agent_stays, connections

__all__ = ["agent_stays", "connections"]
