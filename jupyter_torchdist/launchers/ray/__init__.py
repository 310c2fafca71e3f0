"""Ray: actors of a placement group, one on each node, through which the driver reaches agents. No port is opened."""

from .launcher import RayLauncher

__all__ = ["RayLauncher"]
