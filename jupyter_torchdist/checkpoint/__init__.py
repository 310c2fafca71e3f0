"""Checkpoints: saving and loading the state of a training, of all ranks, while it runs.

``saving`` and ``loading`` are ``td.save`` and ``td.load``; ``checkpointer`` does both for the automatic way. On the way
down: ``objects`` and ``optimizers`` take apart what is saved (``parts``), ``staging`` copies this rank's share,
``directory`` lets it appear by one rename. On the way up: ``sources`` and ``foreign`` are what can be read.
``position`` leads a loop over a loader to where it was; ``ranks`` is how the ranks agree.
"""
