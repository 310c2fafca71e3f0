"""A running job of which no rank makes progress. Its ranks are asked where they are: no line of a log tells."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "rank-not-begun",
        Order.UNDETERMINED,
        "{who} hangs before the first line of the cell.",
        "An object that goes along hangs while it is built anew, an import hangs, or a lock was held at the fork.",
        "`%dist stacks JOB --full` shows it. --fresh starts new interpreters; --exclude NAME leaves a name behind.",
        severity="warning",
    ),
    Kind(
        "groups-deadlocked",
        Order.UNDETERMINED,
        "Ranks wait for each other in different process groups.",
        "Two groups share ranks, and the ranks call the groups' collectives in different orders.",
        "Call the collectives of all groups in the same order on every rank.",
        severity="warning",
    ),
    Kind(
        "dataloader-stuck",
        Order.UNDETERMINED,
        "{who} waits for a DataLoader that gives no batch.",
        "A worker hangs: in the data set's own code, on a slow file system, or on a lock that was held at the fork.",
        "The worker's line shows it. num_workers=0 runs this code in the rank; DataLoader(timeout=60) raises.",
        severity="warning",
    ),
    Kind(
        "store-stuck",
        Order.UNDETERMINED,
        "{who} waits for a key of the store, or for ranks that do not come to it.",
        "No rank sets the key, or not all ranks call what needs all: new_group, init_process_group, a barrier.",
        "Every rank must call new_group and init_process_group, ranks outside the group, too. One must set the key.",
        severity="warning",
    ),
    Kind(
        "destroy-stuck",
        Order.UNDETERMINED,
        "{who} waits in destroy_process_group.",
        "A collective that was started has not ended: another rank never joined it.",
        "Wait for all work of the group on all ranks before destroy_process_group.",
        severity="warning",
    ),
    Kind(
        "ended-early",
        Order.UNDETERMINED,
        "{who} has ended without a collective in which the others wait.",
        "The ranks call different numbers of collectives: uneven batches, a branch on the rank, an exception caught.",
        "DistributedSampler with drop_last=True, or DistributedDataParallel's join(); the same path on all ranks.",
        severity="warning",
    ),
    Kind(
        "no-progress",
        Order.UNDETERMINED,
        "No rank makes progress, and none waits for another in a collective.",
        "All wait for something outside: a file, a lock, a service, a message that nobody sends.",
        "The line of each rank shows it, `%dist stacks JOB --full` the whole stacks. If it may take so long: --stall.",
        severity="warning",
    ),
)
