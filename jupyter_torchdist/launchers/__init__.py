"""Engines that start the processes of a plan: one file per engine."""
