"""NCCL's sockets: interfaces, routes, peers."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "nccl-ifname-missing",
        Order.NCCL,
        "{who} has no network interface that NCCL may use; NCCL_SOCKET_IFNAME asks for {interface}.",
        "NCCL_SOCKET_IFNAME names an interface that does not exist on this node.",
        "Unset NCCL_SOCKET_IFNAME, or give an interface of this node (`ip -br addr`): `eth` means every interface "
        "whose name begins so, `=eth0` exactly this one, `^docker0,lo` all but these. Nodes may need different "
        "values; each may have its own in /etc/nccl.conf or ~/.nccl.conf.",
        (
            r"Bootstrap ?: no socket interface found",
            r"no socket interface found",
            r"No socket interface found",
            r"connecting to address\s.{0,80}with family \d+ is neither AF_INET",
            r"NET/Socket ?: no (?:socket )?interface found",
        ),
    ),
    Kind(
        "address-family",
        Order.NCCL,
        "{who} cannot open a socket: the system lacks this kind of address.",
        "The node or container has no IP interface, or IPv6 is off while an IPv6 address is used.",
        "Give the container a network; NCCL_SOCKET_FAMILY=AF_INET for IPv4 alone.",
        (r"Address family not supported by protocol", r"errno: 97\b"),
    ),
    Kind(
        "wrong-interface",
        Order.NCCL,
        "{who} offers {address} to the others, an address of {interface} that they cannot reach.",
        "NCCL or Gloo chose a virtual interface (a container's bridge, a tunnel, the loopback) instead of the one "
        "that leads to the other nodes.",
        "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME on every node to the interface of the route to the rendezvous "
        "host: `ip -4 route get MASTER_ADDR` names it after `dev`.",
    ),
    Kind(
        "peer-unreachable",
        Order.NCCL,
        "{who} cannot reach {address}: {reason}.",
        "A firewall or a missing route is between two nodes. NCCL uses ports that the system chooses, not only the "
        "rendezvous port.",
        "Allow all TCP between the nodes (ufw, firewalld, the cloud's security group). `nc -l 29999` on one and "
        "`nc -vz HOST 29999` on the other show whether it works.",
        (
            (
                r"onnect to (?P<address>\S+?) (?:returned|failed) ?:? ?(?P<reason>No route to host|Connection timed out"
                r"|Network is unreachable|Software caused connection abort)"
            ),
            r"onnect to (?P<address>\S+?) returned 1(?:13|10|01)\((?P<reason>[^)]+)\)",
            r"Call to connect returned (?P<reason>Connection timed out|No route to host|Network is unreachable)",
            r"errno: 113 - (?P<reason>No route to host)",
            r"onnection attempt to (?P<address>\S+) failed.{0,60}(?P<reason>No route to host|timed out)",
            r"connect(?:ion)? .{0,80}(?P<reason>No route to host)",
            r"timed out connecting: (?P<reason>SO_ERROR: Connection timed out)",
            r"socketPollConnect.{0,120}?(?P<reason>No route to host|Connection timed out)",
        ),
    ),
    Kind(
        "connect-refused",
        Order.CONSEQUENCE,
        "{who} is refused at {address}: nobody listens there.",
        "The other rank has ended, or it offered an address that leads elsewhere (the loopback).",
        "Look at the other rank's log first. Where it lives, set NCCL_SOCKET_IFNAME to the interface that connects "
        "the nodes.",
        (
            r"onnect to (?P<address>\S+?) (?:returned|failed) ?:? ?Connection refused",
            r"onnect to (?P<address>\S+?) returned 111\(",
            r"Call to connect returned Connection refused",
            r"SO_ERROR: Connection refused, remote=\[(?P<address>[^\]]+)\]",
        ),
    ),
    Kind(
        "remote-exit",
        Order.CONSEQUENCE,
        "{who} lost its connection to {address}: that rank ended first, and its log is not here.",
        "Another rank ended. What is seen here is the consequence.",
        "Find the rank that ended first: its log, its exit code, `dmesg` on its node. Give all logs to "
        "`torchdist diagnose` at once.",
        (
            r"Connection closed by remote peer ?(?P<address>[\w.:\[\]<>-]*)",
            r"Connection closed by peer \[(?P<address>[^\]]+)\]",
            r"Call to (?:recv|send)(?: from (?P<address>\S+))? failed ?: (?:Connection reset by peer|Broken pipe)",
            r"Read error \[(?P<address>[^\]]+)\]\S* Connection reset by peer",
            r"Socket recv failed while polling for opId",
            r"ncclRemoteError",
            r"Connection reset by peer",
            r"Broken pipe",
            r"remote process (?:has )?exited",
            r"failed to recv, got 0 bytes",
            r"recvVector?Bytes failed on SocketImpl",
            r"sendBytes failed on SocketImpl",
        ),
    ),
    Kind(
        "bootstrap-mismatch",
        Order.NCCL,
        "{who} finds ranks that disagree about the job: {reason}.",
        "Processes have different world sizes, two have the same rank, or ranks of an earlier job still run.",
        "Give all ranks the same WORLD_SIZE and each its own RANK. End processes of earlier jobs "
        "(`nvidia-smi` shows them).",
        (
            r"Bootstrap Root ?: (?P<reason>mismatch in .{0,120})",
            r"Bootstrap Root ?: (?P<reason>rank \d+ of \d+ ranks has already checked in)",
        ),
    ),
    Kind(
        "too-many-files",
        Order.OWN,
        "{who} has reached its limit of open files.",
        "Every connection and every piece of shared memory is an open file; the limit of this process is too low.",
        "`ulimit -n 65536` before the job (containers: `--ulimit nofile=65536`; services: LimitNOFILE=). DataLoader "
        "workers: torch.multiprocessing.set_sharing_strategy('file_system').",
        (r"Too many open files", r"received 0 items of ancdata"),
    ),
    Kind(
        "net-plugin-failed",
        Order.NCCL,
        "{who} could not start NCCL's network plugin: {reason}.",
        "The plugin for the fast network (EFA, SHARP, a vendor's) failed; NCCL stops, or falls back to sockets.",
        "Mend the plugin: libfabric's and aws-ofi-nccl's versions, the device's permissions in the container. "
        "NCCL_NET=Socket confirms that the rest works.",
        (
            r"NET/OFI (?P<reason>.{0,120}(?:initialization failed|failed to initialize|Failed to initialize).{0,60})",
            r"(?P<reason>Failed to initialize any NET plugin)",
            r"Error: network (?P<reason>\S+ not found)",
            r"NET/OFI (?P<reason>(?:Couldn't|Failed to|No eligible|Unable to).{0,100})",
            r"(?P<reason>Failed to find (?:a )?(?:CUDA-)?(?:compatible|eligible) (?:net )?provider.{0,60})",
        ),
    ),
    Kind(
        "nccl-version-mismatch",
        Order.NCCL,
        "Ranks use different versions of NCCL: {reason}.",
        "The nodes have different builds of torch, or one finds another libnccl in LD_LIBRARY_PATH.",
        "Install the same torch everywhere. Remove system paths with libnccl.so from LD_LIBRARY_PATH and LD_PRELOAD; "
        "`python -c 'import torch; print(torch.cuda.nccl.version())'` on each node must say the same.",
        (
            r"Mismatched NCCL version detected ?: (?P<reason>.{0,140})",
            r"connecting to address\s.{0,80}with family 0 is neither AF_INET",
        ),
    ),
    Kind(
        "config-mismatch",
        Order.NCCL,
        "{who} gets messages of another size than it expects: {reason}.",
        "Ranks call collectives with tensors of different sizes, or NCCL_* variables differ between them.",
        "Compare shapes before the call, and the environment of all ranks (`env | grep NCCL`).",
        (
            r"(?P<reason>[Mm]essage truncated ?: receiving \d+ bytes instead of \d+)",
            r"(?P<reason>collective mismatch error.{0,100})",
            r"(?P<reason>posted incorrect receive info.{0,60})",
            r"(?P<reason>peer \S+ posted incorrect receive info.{0,60})",
        ),
    ),
    Kind(
        "nccl-bug",
        Order.NCCL,
        "{who} meets a fault of this NCCL version: {reason}.",
        "NCCL 2.19 and 2.20 confuse two connections while they start.",
        "Use another NCCL version (another torch), 2.21 or above.",
        (
            r"ootstrap\S*(?: \([^)]*\))? NCCL WARN (?P<reason>Message truncated ?: received \d+ bytes instead of \d+)",
            r"(?P<reason>Message truncated ?: received \d+ bytes instead of \d+)",
        ),
    ),
    Kind(
        "host-lost",
        Order.UNDETERMINED,
        "Nothing was heard of a host any more, and no driver was connected.",
        "It was switched off, it crashed, or the network between the hosts failed. The ranks of the other hosts could "
        "only wait for its ranks.",
        "`%dist doctor --hosts HOST` shows whether it is back. Then run the cell again, from its last checkpoint if it "
        "saves any.",
    ),
)
