"""The names of Databricks' ``serverless_gpu``: ``from jupyter_torchdist.serverless_gpu import distributed``."""

from ..functions.decorated import distributed

__all__ = ["distributed"]
