"""InfiniBand and RoCE, shared memory, NVLink: what NCCL moves data over."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "ib-roce-unreachable",
        Order.NCCL,
        "{who} gets no answer from {address} over InfiniBand or RoCE (transport retries exceeded).",
        "The two adapters do not reach each other: a wrong GID, a rail without a connection, a wrong VLAN.",
        "NCCL_IB_GID_INDEX=3 (`show_gids` lists them), NCCL_IB_HCA to name the right adapters, NCCL_CROSS_NIC=0 "
        "where rails are separate. `ib_write_bw` between the two nodes shows whether the fabric works.",
        (
            r"Got completion from peer (?P<address>\S+) with (?:status=(?:IBV_WC_RETRY_EXC_ERR)?\(?12\)?|error 12)\b",
            r"IBV_WC_RETRY_EXC_ERR",
            r"Got completion with error 12\b",
            r"transport retry counter exceeded",
        ),
    ),
    Kind(
        "ib-link-error",
        Order.NCCL,
        "{who} lost {address} over InfiniBand or RoCE after the job had run.",
        "A link, port or switch of the fabric fails now and then.",
        "The adapter and GIDs in the line name the rail: look at its port's error counters (`perfquery`, `ibstat`). "
        "NCCL_IB_TIMEOUT=22 and NCCL_IB_RETRY_CNT=7 bridge short gaps.",
    ),
    Kind(
        "gdr-acs",
        Order.NCCL,
        "{who} may not move data between GPU and adapter (local protection error).",
        "PCIe access control (ACS) or the IOMMU is between GPU and network adapter.",
        "Disable ACS in the BIOS, or with setpci. NCCL_NET_GDR_LEVEL=0 confirms it.",
        (
            r"Got completion from peer (?P<address>\S+) with (?:status=(?:IBV_WC_LOC_PROT_ERR)?\(?4\)?|error 4)\b",
            r"IBV_WC_LOC_PROT_ERR",
        ),
    ),
    Kind(
        "ib-flush",
        Order.NCCL,
        "{who} had its InfiniBand queue flushed after an error of {address}.",
        "An earlier error closed the connection; PCIe access control or the adapter's firmware are the usual reasons.",
        "Look for the first error in the logs of all ranks. Disable ACS; update the adapter's firmware.",
        (
            r"Got completion from peer (?P<address>\S+) with (?:status=(?:IBV_WC_WR_FLUSH_ERR)?\(?5\)?|error 5)\b",
            r"IBV_WC_WR_FLUSH_ERR",
        ),
    ),
    Kind(
        "ib-unreachable-net",
        Order.NCCL,
        "{who} cannot set up an InfiniBand connection: {reason}.",
        "The adapter's GID has no route to the peer, or an adapter without a network is used.",
        "NCCL_IB_GID_INDEX=3 for RoCE v2; NCCL_IB_HCA=^mlx5_3 leaves out an adapter.",
        (
            (
                r"ibv_modify_qp failed with (?:error )?(?P<reason>.{0,12}(?:Network is unreachable|No such device"
                r"|Invalid argument|Connection timed out|No route to host).{0,20})"
            ),
        ),
    ),
    Kind(
        "memlock-limit",
        Order.NCCL,
        "{who} may not lock enough memory for the network adapter.",
        "The limit of locked memory (`ulimit -l`) is too low for InfiniBand.",
        "Unlimited memlock: limits.conf and a new login; containers `--ulimit memlock=-1`; slurmd's and sshd's "
        "services LimitMEMLOCK=infinity.",
        (
            r"ibv_reg_mr\w* failed with error (?P<reason>Cannot allocate memory)",
            r"ibv_create_(?:cq|qp) failed",
        ),
    ),
    Kind(
        "shm-too-small",
        Order.NCCL,
        "{who} has no room left in /dev/shm.",
        "Containers have 64 MB of shared memory unless told otherwise; NCCL and DataLoader workers need more.",
        "docker: `--shm-size=8g` or `--ipc=host`; Kubernetes: an emptyDir with `medium: Memory` at /dev/shm. "
        "NCCL_SHM_DISABLE=1 confirms it.",
        (
            r"(?:failed|Failed) to extend \S*/dev/shm",
            r"posix_fallocate failed ?: No space left on device",
            r"Error while creating shared memory segment",
            r"nable to write to file </torch_",
            r"insufficient shared memory",
            r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Bus error",
            r"No space left on device .{0,40}/dev/shm",
        ),
    ),
    Kind(
        "shm-attach",
        Order.NCCL,
        "{who} does not find the shared memory that another rank of its node made.",
        "Ranks of one node have separate /dev/shm (two containers), or choose different kinds of memory.",
        "NCCL_CUMEM_HOST_ENABLE=0. Containers of one node: `--ipc=host`, or one shared IPC namespace.",
        (r"Error while attaching to shared memory segment",),
    ),
    Kind(
        "cumem-host",
        Order.NCCL,
        "{who} cannot use CUDA's host memory for exchange within the node: {reason}.",
        "cuMem host buffers do not work on this machine (NUMA, container, driver).",
        "NCCL_CUMEM_HOST_ENABLE=0.",
        (r"transport/shm.cc:\d+ (?:\([^)]*\) )?NCCL WARN Cuda failure (?P<reason>.{0,80})",),
    ),
    Kind(
        "p2p-unsupported",
        Order.NCCL,
        "{who} cannot reach another GPU of its node directly.",
        "The cards have no peer-to-peer access to each other.",
        "NCCL_P2P_DISABLE=1 in the environment of the ranks.",
        (
            r"peer access is not supported between these two devices",
            r"failed to open CUDA IPC handle ?: 217",
            r"failed to open CUDA IPC handle",
            r"cudaErrorPeerAccessUnsupported",
            r"doesn't support faster communication broadband via P2P or IB",
        ),
    ),
    Kind(
        "p2p-nvlink-hw",
        Order.NCCL,
        "{who} finds direct access off between GPUs that NVLink connects.",
        "A fault of hardware or driver: access over NVLink should work.",
        "`nvidia-smi nvlink -s` and `nvidia-smi topo -p2p r`; reset or reboot. NCCL_IGNORE_DISABLED_P2P=1 goes on "
        "without it.",
        (r"P2P is disabled between NVLINK connected GPUs",),
    ),
    Kind(
        "p2p-acs-hang",
        Order.COLLECTIVE,
        "The first collective did not end on any rank, between GPUs that NCCL had connected directly.",
        "PCIe's access control (ACS) or the IOMMU sends what the GPUs exchange astray. No message tells it.",
        "NCCL_P2P_DISABLE=1: when the job then runs, it is this. To mend: ACS off on the bridges, `iommu=pt`.",
    ),
    Kind(
        "nvls-fabric-manager",
        Order.NCCL,
        "{who} cannot use NVLink SHARP (NVLS): {reason}.",
        "The Fabric Manager was started again without a reset of the GPUs, or the container lacks its devices.",
        "NCCL_NVLS_ENABLE=0 goes on without it. To mend: stop nvidia-fabricmanager, `nvidia-smi -r`, start it, or "
        "reboot.",
        (
            r"transport/nvls.cc:\d+ (?:\([^)]*\) )?NCCL WARN (?P<reason>Cu\w+ failure .{0,80})",
            r"(?P<reason>Failed to bind NVLink SHARP \(NVLS\) Multicast memory.{0,40})",
        ),
    ),
    Kind(
        "ib-missing",
        Order.PERFORMANCE,
        "{who} uses TCP sockets between nodes; NCCL found no InfiniBand adapter.",
        "The container does not see the adapter, or libibverbs is not installed. The job works, slowly.",
        "Containers: `--device=/dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 --network host`; install "
        "libibverbs1. Without InfiniBand all is well.",
        (r"Call to ibv_open_device failed",),
        "warning",
    ),
    Kind(
        "gdr-disabled",
        Order.PERFORMANCE,
        "{who} sends through host memory: GPUDirect RDMA is off for its adapter.",
        "nvidia-peermem is not loaded and DMA-BUF is not available, or NCCL is older than 2.23 and looks for the "
        "module by its old name. The job works, slowly.",
        "`modprobe nvidia-peermem`; NCCL 2.23 or above.",
        (r"GPU Direct RDMA Disabled for HCA",),
        "warning",
    ),
)
