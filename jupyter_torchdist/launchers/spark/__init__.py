"""Spark: tasks of a barrier stage, one on each node, through which the driver reaches agents."""

from .launcher import SparkLauncher

__all__ = ["SparkLauncher"]
