"""Hosts that ``ssh`` reaches. Nothing is installed there: the rooms that run on a node are sent once per version."""

from .launcher import SshLauncher

__all__ = ["SshLauncher"]
