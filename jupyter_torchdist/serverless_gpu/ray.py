"""``from jupyter_torchdist.serverless_gpu.ray import ray_launch``, as in Databricks' ``serverless_gpu.ray``."""

from ..functions.ray_launched import ray_launch

__all__ = ["ray_launch"]
