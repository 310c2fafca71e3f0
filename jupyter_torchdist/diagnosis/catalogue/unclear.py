"""Errors that name no cause."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "cuda-error",
        Order.NCCL,
        "{who} has an error of CUDA: {reason}.",
        "A call of the CUDA driver failed. What failed before it in the log is nearer to the cause.",
        "NCCL_DEBUG=INFO names the call; `nvidia-smi` and `dmesg` show the state of the card.",
        (
            r"Cuda failure (?:\d+ )?'(?P<reason>[^']{1,80})'",
            r"Cuda failure (?P<reason>\d+)",
            r"CUDA error: (?P<reason>[^\n]{1,80})",
            r"ncclUnhandledCudaError(?P<reason>)",
        ),
    ),
    Kind(
        "nccl-error",
        Order.UNCLEAR,
        "NCCL failed on {who} ({reason}), and the logs do not say why.",
        "NCCL's own words are missing: its warnings were off, or stand in another file.",
        "NCCL_DEBUG=WARN and once more; with the logs of all ranks.",
        (
            r"nccl(?P<reason>SystemError|InternalError|InvalidUsage|InvalidArgument)\b",
            r"NCCL error in: \S+ (?P<reason>[\w ]+)",
            r"NCCL [Ee]rror(?: \d)?: (?P<reason>(?!in: )[\w ]+)",
            r"NCCL communicator was aborted",
        ),
    ),
    Kind(
        "undetermined",
        Order.UNDETERMINED,
        "The job failed, and these logs do not say why.",
        "No line tells a cause.",
        "Give the logs of all ranks and nodes at once; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL say more.",
    ),
)
