"""Checkpoints: save and load the training state of all ranks, while the training runs.

``saving`` and ``loading`` implement ``td.save`` and ``td.load``. To save: ``objects`` and ``optimizer_states`` take the
state apart (``structures``), ``staging`` copies this rank's share, ``directory`` publishes the checkpoint by one
rename. To load: ``sources`` and ``foreign`` read checkpoints. ``position`` continues a loop over a loader at its saved
position. ``rank_agreement`` is the communication between the ranks.
"""
