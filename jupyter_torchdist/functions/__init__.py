"""Python functions that run on ranks: ``@distributed``, ``launch``, ``TorchDistributor``, ``ray_launch``."""
