"""Kubernetes: an indexed Job whose pods wait for the driver, which comes by ``exec``. No port is opened."""

from .launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher"]
