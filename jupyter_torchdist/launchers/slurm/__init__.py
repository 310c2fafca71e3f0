"""Slurm: a batch job whose nodes wait for the driver, which comes by ``srun``. No port is opened."""

from .launcher import SlurmLauncher

__all__ = ["SlurmLauncher"]
