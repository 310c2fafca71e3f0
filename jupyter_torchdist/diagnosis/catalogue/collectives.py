"""Ranks that do not do the same thing at the same time."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "collective-mismatch",
        Order.RENDEZVOUS,
        "Ranks call different collectives at the same point: {reason}.",
        "A branch, a shape or a list of parameters depends on the rank.",
        "Make the path to the collective equal on all ranks. TORCH_DISTRIBUTED_DEBUG=DETAIL names what each rank "
        "calls.",
        (
            (
                r"Detected mismatch between collectives on ranks. (?P<reason>Rank \d+ is running collective: "
                r"CollectiveFingerPrint\(.{0,40}OpType=\w+.{0,60})"
            ),
            r"Detected mismatch between collectives",
            r"Mismatched collective detected",
            r"op.preamble.length <= op.nbytes. (?P<sent>\d+) vs (?P<expected>\d+)",
            r"eceived data size doesn't match expected size",
            r"DDP expects same model across all ranks(?P<reason>)",
            r"parameters? (?:shapes?|sizes?) .{0,40}do not match across ranks",
            r"has \d+ params, while rank \d+ has inconsistent \d+ params",
        ),
    ),
    Kind(
        "unused-parameters",
        Order.OWN,
        "{who} has parameters that took no part in the loss of the last step.",
        "DistributedDataParallel waits for a gradient of every parameter.",
        "find_unused_parameters=True, or leave these parameters out of the model.",
        (r"Expected to have finished reduction in the prior iteration",),
    ),
    Kind(
        "marked-twice",
        Order.OWN,
        "{who} uses a parameter in two backward passes of one step.",
        "DistributedDataParallel marks each parameter ready once; checkpointed activations with unused parameters, or "
        "shared ones, do it twice.",
        "checkpoint(..., use_reentrant=False); no find_unused_parameters; static_graph=True.",
        (r"Expected to mark a variable ready only once",),
    ),
    Kind(
        "rank-stuck",
        Order.COLLECTIVE,
        "{who} never came to {collective}.",
        "That rank was busy or stuck elsewhere: data loading, a download, a checkpoint, a lock.",
        "`py-spy dump --pid PID` of that rank while it hangs shows the line.",
        (
            r"Ranks? (?P<culprit>[\d, ]+) failed to pass monitoredBarrier",
            r"Rank (?P<culprit>\d+) failed to pass monitoredBarrier",
        ),
    ),
    Kind(
        "uneven-inputs",
        Order.COLLECTIVE,
        "{ended} ended its loop before {who}, with fewer batches: {reason}.",
        "The ranks have different numbers of batches, so that one calls more collectives than another.",
        "DistributedSampler with drop_last=True, or DistributedDataParallel's join().",
        (r"Detected at least one rank that has exhausted inputs",),
    ),
    Kind(
        "rank0-only-work",
        Order.COLLECTIVE,
        "{who} was at work alone while the other ranks waited in a {operation} of one element until their time-out.",
        "Rank 0 saves, evaluates or downloads longer than the others' time-out allows.",
        "A longer time-out (init_process_group(timeout=…)), asynchronous or sharded saving "
        "(torch.distributed.checkpoint), the same work on all ranks.",
    ),
    Kind(
        "collective-hangs",
        Order.COLLECTIVE,
        "All ranks came to one collective, and it does not end: {reason}.",
        "The ranks agree. The network, the link between two GPUs or one GPU stands still.",
        "`dmesg` and `nvidia-smi` on the nodes show a GPU that failed. NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, "
        "tell which link stands still. NCCL_DEBUG=INFO names the transports.",
    ),
    Kind(
        "desync",
        Order.COLLECTIVE,
        "Ranks are at different collectives: {reason}.",
        "A rank called one collective more or less than the others: a branch on the rank, uneven batches, an "
        "exception that was caught.",
        "Compare the two ranks' stacks; TORCH_DISTRIBUTED_DEBUG=DETAIL, and the flight recorder's dumps "
        "(TORCH_FR_BUFFER_SIZE), name the lines.",
    ),
    Kind(
        "watchdog-same-op",
        Order.COLLECTIVE,
        "A {operation} timed out on {ranks}, and the logs do not say which rank held it up.",
        "One rank is slow or stuck, or the network stands still. This alone does not decide.",
        "Give the logs of all ranks. Stacks of all ranks at the time of the hang (`py-spy dump`), "
        "TORCH_FR_BUFFER_SIZE=2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 decide it.",
        (
            r"atchdog caught collective operation timeout",
            r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
            r"Caught collective operation timeout",
            r"Application timeout caused pair closure",
        ),
    ),
    Kind(
        "heartbeat",
        Order.COLLECTIVE,
        "{who}'s NCCL watchdog stood still for {seconds} s.",
        "A call of CUDA hangs, or a thread holds Python's global lock.",
        "`py-spy dump --native --pid PID` of that rank. TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC gives it longer.",
        (
            r"watchdog got stuck for (?P<seconds>\d+) seconds",
            r"possible GIL induced hang",
            r"Heartbeat monitor timed out",
        ),
    ),
)
