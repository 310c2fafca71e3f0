"""CUDA, the driver, the card."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "cuda-oom",
        Order.OWN,
        "{who} ran out of GPU memory.",
        "The GPU was full: the model and its batch, or another process on the same card.",
        "A smaller batch, gradient accumulation, `--strategy fsdp`. `nvidia-smi` shows other processes. NCCL needs "
        "some memory too: leave a gigabyte.",
        (
            r"OutOfMemoryError",
            r"CUDA out of memory",
            r"Cuda failure (?:\d+ )?'out of memory'",
            r"Cuda failure 2\b",
            r"Failed to CUDA (?:calloc|malloc|host alloc)\w* \d+ bytes",
            r"CUDA error: out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"HIP out of memory",
        ),
    ),
    Kind(
        "gpu-ecc",
        Order.OWN,
        "{who} has a GPU with a memory error that could not be corrected.",
        "A fault of the card's memory (ECC).",
        "`nvidia-smi -q -d ECC`; reset the card, and take it out of service when it comes again.",
        (
            r"uncorrectable ECC error",
            r"cudaErrorECCUncorrectable",
            r"Xid \(PCI:[^)]*\): (?:48|63|64|94|95)\b",
        ),
    ),
    Kind(
        "gpu-off-bus",
        Order.OWN,
        "{who} lost its GPU: the card no longer answers.",
        "The card fell off the bus: power, PCIe, heat or a fault of the card.",
        "Reboot the node; check power and cooling; replace the card when it comes again.",
        (
            r"Xid \(PCI:[^)]*\): 79\b",
            r"GPU has fallen off the bus",
            r"GPU is lost",
            r"Unable to determine the device handle for",
        ),
    ),
    Kind(
        "nvlink-error",
        Order.OWN,
        "{who} has an error of NVLink.",
        "A link between two cards fails.",
        "`nvidia-smi nvlink -e`; `dcgmi diag -r 1` when nothing runs; reset or replace.",
        (
            r"Xid \(PCI:[^)]*\): 74\b",
            r"uncorrectable NVLink error",
            r"cudaErrorNvlinkUncorrectable",
        ),
    ),
    Kind(
        "cuda-kernel-error",
        Order.OWN,
        "{who} ran a CUDA kernel that failed: {reason}.",
        "A kernel of the program reads or writes where it may not, or an index is out of range (a label, a token id "
        "above the vocabulary). The network is not at fault.",
        "CUDA_LAUNCH_BLOCKING=1 makes the traceback name the line. For a device-side assert run the same rows on the "
        "CPU.",
        (
            (
                r"CUDA error: (?P<reason>an illegal memory access was encountered|device-side assert triggered"
                r"|unspecified launch failure|misaligned address|an illegal instruction was encountered"
                r"|invalid configuration argument|the launch timed out and was terminated)"
            ),
            (
                r"Cuda failure (?:\d+ )?'(?P<reason>an illegal memory access was encountered"
                r"|device-side assert triggered|unspecified launch failure|misaligned address)'"
            ),
            r"Assertion `(?P<reason>[^`]{1,120})` failed",
            r"CUBLAS_STATUS_(?P<reason>EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE)",
            r"Xid \(PCI:[^)]*\): (?P<reason>13|31)\b",
        ),
    ),
    Kind(
        "gpu-arch-unsupported",
        Order.OWN,
        "{who} has a GPU for which this build of torch holds no kernels.",
        "torch, or an extension, was compiled for other generations of GPUs.",
        "Install the build of torch for this card's CUDA version (pytorch.org); build extensions again with "
        "TORCH_CUDA_ARCH_LIST.",
        (
            r"no kernel image is available for execution",
            r"is not compatible with the current PyTorch installation",
        ),
    ),
    Kind(
        "driver-too-old",
        Order.OWN,
        "{who} has an NVIDIA driver that is too old for this build.",
        "The driver does not know this CUDA version.",
        "A newer driver on the node, or torch built for an older CUDA.",
        (
            r"CUDA driver version is insufficient",
            r"CUDA Driver version found is",
            r"The NVIDIA driver on your system is too old",
        ),
    ),
    Kind(
        "fabric-manager-down",
        Order.OWN,
        "{who} finds GPUs that are not initialised: the Fabric Manager is not running.",
        "Machines with NVSwitch need the service nvidia-fabricmanager, of the driver's version.",
        "`systemctl enable --now nvidia-fabricmanager`; its version must be the driver's.",
        (
            r"system not yet initialized",
            r"Error 802\b",
            r"Cuda failure 802\b",
        ),
    ),
    Kind(
        "no-gpu",
        Order.OWN,
        "{who} has no GPU that it may use: {reason}.",
        "No driver, no card in the container, CUDA_VISIBLE_DEVICES hides it, or more ranks than GPUs.",
        "`nvidia-smi` in the same place (container, batch job); docker: `--gpus all`; as many ranks as GPUs.",
        (
            r"(?P<reason>No CUDA GPUs are available)",
            r"(?P<reason>Found no NVIDIA driver on your system)",
            r"(?P<reason>ProcessGroupNCCL is only supported with GPUs, no GPUs found)",
            r"(?P<reason>no CUDA-capable device is detected)",
            r"CUDA-capable device\(s\) is/are (?P<reason>busy or unavailable)",
            r"Cuda failure (?:\d+ )?'(?P<reason>no CUDA-capable device is detected)'",
        ),
    ),
    Kind(
        "device-ordinal",
        Order.OWN,
        "{who} asks for a GPU that it does not have (invalid device ordinal).",
        "There are more ranks on the node than GPUs that they may see.",
        "As many ranks on each node as GPUs; look at CUDA_VISIBLE_DEVICES; use LOCAL_RANK, not RANK, as the device.",
        (r"invalid device ordinal", r"Invalid device id"),
    ),
    Kind(
        "duplicate-gpu",
        Order.NCCL,
        "Two ranks use the same GPU: {reason}.",
        "The program does not choose the GPU of its rank, or there are more ranks than GPUs.",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first use of CUDA; as many ranks as GPUs.",
        (
            r"Duplicate GPU detected ?: (?P<reason>rank \d+ and rank \d+ both on CUDA device \w+)",
            r"Multiple Ranks are using the same GPU(?P<reason>/Partition)?",
        ),
    ),
    Kind(
        "nccl-too-old-for-gpu",
        Order.NCCL,
        "{who} has a GPU that this NCCL does not know: {reason}.",
        "NCCL's kernels do not fit the card.",
        "A newer NCCL (a newer torch).",
        (r"(?P<reason>ncclMaxSharedMem \d+ exceeds device/fn maxSharedMem \d+)",),
    ),
)
