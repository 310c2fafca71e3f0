"""Ranks of a running job for which the others wait again and again. The ranks are watched: no line of a log tells."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "late-by-input",
        Order.PERFORMANCE,
        "{who} holds up the others: it waits for data.",
        "Its DataLoader gives batches more slowly than the training takes them. The other ranks wait in collectives.",
        "More num_workers, a larger prefetch_factor; samples on a local disk; less work in __getitem__ for its rows.",
        severity="warning",
    ),
    Kind(
        "late-by-network",
        Order.PERFORMANCE,
        "{who} holds up the others: it waits for the network.",
        "The rank reads from or writes to a socket at that line. The other ranks wait in collectives.",
        "Do this in a thread, or not in each step; have one copy of the data per host.",
        severity="warning",
    ),
    Kind(
        "late-by-work",
        Order.PERFORMANCE,
        "{who} holds up the others: it works longer.",
        "The rank has more to do than the others, or its processor or GPU is slower, hot or shared. The other ranks "
        "wait in collectives.",
        "Give each rank the same work at that line; see what else uses its cores or GPU (`%dist nodes`); "
        "`%dist profile JOB` shows a step of all ranks.",
        severity="warning",
    ),
    Kind(
        "gpu-slowed",
        Order.PERFORMANCE,
        "{who} has a GPU that is slowed down by {reason}.",
        "The card lowers its clock to stay within its temperature, or because the power supply asks for it. All ranks "
        "wait for the slowest.",
        "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` there; see to cooling and power; use another card meanwhile.",
        severity="warning",
    ),
)
