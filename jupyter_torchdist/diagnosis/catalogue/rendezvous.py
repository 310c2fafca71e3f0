"""How ranks find each other: the store, torchrun's rendezvous, Gloo's mesh."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "port-in-use",
        Order.RENDEZVOUS,
        "{who} cannot listen on port {port}: it is taken.",
        "Another job, or a process left from an earlier one, listens on the rendezvous port.",
        "Another port (`--master-port`, MASTER_PORT), or `--standalone`, which takes a free one. "
        "`ss -ltnp | grep :PORT` names who listens.",
        (
            r"failed to listen on any local network address. port: (?P<port>\d+).{0,80}EADDRINUSE",
            r"EADDRINUSE",
            r"errno: 98\b",
            r"ddress already in use",
        ),
    ),
    Kind(
        "port-is-http",
        Order.RENDEZVOUS,
        "{who} finds a web server on the rendezvous port.",
        "A web server or proxy (Jupyter itself, a service mesh) answers where the store of torch should.",
        "Another MASTER_PORT; no HTTP proxy between the nodes.",
        (r"Ping failed, invalid value returned from server. Expected: \d+, Got: (?:1347703880|1329865020)\b",),
    ),
    Kind(
        "port-is-other",
        Order.RENDEZVOUS,
        "{who} finds something else than torch's store on the rendezvous port.",
        "Another program, or the store of another version of torch, answers there.",
        "Another MASTER_PORT; the same torch on all nodes.",
        (r"Ping failed, invalid value returned from server",),
    ),
    Kind(
        "master-addr-dns",
        Order.RENDEZVOUS,
        "{who} cannot resolve {name}.",
        "MASTER_ADDR (or the rendezvous endpoint) is a name that this node does not know; names of ~/.ssh/config "
        "are known to ssh alone.",
        "Give an IP address, or add the name to /etc/hosts on every node.",
        (
            r"network addresses of \((?P<name>[^,]+), (?P<port>\d+)\) cannot be retrieved \(gai error",
            r"gai error: -\d",
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"nodename nor servname provided",
            r"Could not resolve host(?:name)?",
        ),
    ),
    Kind(
        "hostname-resolves-wrong",
        Order.RENDEZVOUS,
        "{who} takes {name} for an address that is not the rendezvous host.",
        "A host name of digits only is read as a number, so as an IPv4 address; or /etc/hosts leads the host's own "
        "name to 127.0.1.1.",
        "torchrun `--local-addr IP`, or the IP address as MASTER_ADDR; rename the host, or mend /etc/hosts.",
        (
            r"network address of \((?P<name>\d{5,}), \d+\)",
            r"connect to (?:host )?\[?(?:::ffff:)?(?P<name>127\.0\.1\.1)\b",
            r"remote=\[(?P<name>127\.0\.1\.1)\]",
        ),
    ),
    Kind(
        "master-addr-unreachable",
        Order.RENDEZVOUS,
        "{who} cannot reach the rendezvous host at {name}, port {port}.",
        "MASTER_ADDR or MASTER_PORT is wrong, a firewall is between, or rank 0 was not started.",
        "`nc -vz MASTER_ADDR MASTER_PORT` from every node while rank 0 waits. Use the address of the interface that "
        "connects the nodes; open the port.",
        (
            (
                r"client socket has timed out after \d+\s?(?:ms|s|seconds) while trying to connect to "
                r"\((?P<name>[^,]+), (?P<port>\d+)\)"
            ),
            (
                r"client socket has failed to connect to (?:any network address of )?"
                r"\(?\[?(?P<name>[\w.:-]+?)\]?, (?P<port>\d+)\)?"
            ),
            (
                r"failed to connect to \[?(?:::ffff:)?(?P<name>[\w.-]+)\]?[:,] ?(?P<port>\d+).{0,60}"
                r"errno: (?:110|111|113)\b"
            ),
            r"failed to connect/validate to host (?P<name>[\w.-]+):(?P<port>\d+)",
            r"connect\(\) timed out\. Original timeout was",
            r"RuntimeError: Connection (?:refused|timed out)\s*$",
        ),
    ),
    Kind(
        "world-incomplete",
        Order.RENDEZVOUS,
        "Only {here} of {all} ranks came within {seconds} s.",
        "A node or process was not started, ended before it joined, or reached another rendezvous.",
        "Start all nodes within the time-out, with the same number of nodes and of processes; look at the log of the "
        "missing ones.",
        (
            r"imed out after (?P<seconds>\d+) seconds waiting for \w+. (?P<here>\d+)/(?P<all>\d+) \w+ joined",
            (
                r"Timed out initializing process group in store based barrier on rank: \d+.{0,60}"
                r"world_size=(?P<all>\d+), worker_count=(?P<here>\d+)"
            ),
            r"store based barrier.{0,80}world_size=(?P<all>\d+), worker_count=(?P<here>\d+)",
        ),
    ),
    Kind(
        "rendezvous-timeout",
        Order.RENDEZVOUS,
        "{who} waited in vain for the other nodes at torchrun's rendezvous.",
        "A node was not started, or has another --rdzv-id or --rdzv-endpoint, or cannot reach the endpoint.",
        "The same --rdzv-id, --rdzv-endpoint and --nnodes on every node; the endpoint's port open.",
        (
            r"RendezvousTimeoutError",
            r"RendezvousConnectionError",
            r"RendezvousClosedError",
            r"RendezvousStateError",
        ),
    ),
    Kind(
        "store-wait-timeout",
        Order.RENDEZVOUS,
        "The others waited in vain for {who}, which should start an NCCL group and never came to it.",
        "The other rank did not reach this collective: it is slow (a download, a checkpoint), stuck, or has ended.",
        "Look at the other rank's log and stack at that time. Let all ranks come together before (a barrier), or give "
        "a longer time-out.",
        (
            r"retr(?:ie|ei)ving ncclUniqueId from \[(?P<culprit>\d+)\]",
            r"wait timeout after \d+\s?ms, keys",
            r"DistStoreError: Socket Timeout",
            r"RuntimeError: Socket Timeout",
        ),
    ),
    Kind(
        "gloo-ifname-invalid",
        Order.RENDEZVOUS,
        "{who} has no network interface {interface}, which GLOO_SOCKET_IFNAME names.",
        "Gloo wants the name of one interface: no `^`, no prefix, no address. A list is separated by commas.",
        "GLOO_SOCKET_IFNAME=eth0, a name that `ip -br addr` shows on this node.",
        (
            r"ifa != nullptr. Unable to find address for: (?P<interface>\S+)",
            r"Unable to find (?:interface|address) for: (?P<interface>\S+)",
            r"Unable to find interface (?P<interface>\S+)",
        ),
    ),
    Kind(
        "gloo-loopback",
        Order.RENDEZVOUS,
        "{who} offers the loopback address to the other nodes.",
        "The host's own name resolves to 127.0.0.1, and Gloo takes the address of the name.",
        "GLOO_SOCKET_IFNAME on all nodes: the interface that connects them.",
        (r"connectFullMesh failed.{0,400}remote=\[(?:127\.|::1)",),
    ),
    Kind(
        "gloo-unreachable",
        Order.RENDEZVOUS,
        "{who} could not connect to the other ranks by Gloo.",
        "A firewall is between the nodes, or Gloo uses an interface that does not connect them.",
        "GLOO_SOCKET_IFNAME on all nodes: the interface that connects them. Allow all TCP between them.",
        (r"connectFullMesh failed", r"gloo/transport/tcp/\S+ .{0,60}connect: (?P<reason>.*)"),
    ),
)
