"""Plans on which node and GPU each rank runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ..protocol import releases
from ..protocol.errors import OptionError, ResourceError
from ..protocol.plan import Gpu, Inventory, NodePlan, Plan, is_open
from ..protocol.spec import JobSpec, Options
from .placing import as_few_as_will_do, places, with_gpus_of_type
from .software import install
from .strategy import plan_strategy

OVERSUBSCRIPTION_LIMIT = 32
"""The largest number of CPU ranks for each core: with more, the time is spent in the scheduler, not in the cell."""

RANK_MEMORY = 64 * 1024**2
"""The smallest number of bytes that a forked rank needs (process group, interpreter state)."""


def make_plan(
    spec: JobSpec,
    inventories: Sequence[Inventory],
    *,
    busy: Mapping[str, str] | None = None,
    own: Collection[int] = (),
    fits: Callable[[Plan], bool | None] | None = None,
) -> Plan:
    """The plan of ``spec`` on the nodes with these inventories, in their order.

    ``busy`` maps UUIDs of GPUs that an earlier job holds to this job. ``own`` are pids whose GPU memory does not make a
    GPU busy (the kernel itself). ``fits`` is called for ``--strategy auto`` on several GPUs, with the plan so far; its
    result goes to ``plan_strategy``. Raises ``ResourceError`` when fewer resources are available than requested, and
    what ``plan_strategy`` raises.
    """
    options = spec.options
    inventories = _selected(options, inventories, busy or {}, set(own))
    _check_range(options, len(inventories))
    for inventory in inventories:
        _check_software(inventory, inventories)
    counts, gpus = _placed(options, inventories, busy or {}, set(own))
    nodes = _nodes(counts, gpus, inventories)
    every_gpu = tuple(gpu for chosen in gpus for gpu in chosen)
    world_size = sum(counts)
    plan = Plan(
        job=spec.job,
        world_size=world_size,
        backend=options.backend or ("nccl" if every_gpu else "gloo"),
        nodes=nodes,
        fresh=options.fresh,
        numa_binding=options.numa_binding,
        timeout=options.timeout,
        grace=options.grace,
        collect=options.collect,
        out=options.out,
        env_names=tuple(item.split("=", 1)[0] for item in options.env),
        strategy=plan_strategy(options, world_size, nodes, every_gpu),
        role=options.role,
        run_id=options.run_id,
        port=options.port,
        restarts=options.restarts,
        least_nodes=options.least_nodes,
        virtual_local_rank=options.virtual_local_rank,
        lease=options.lease,
    )
    if fits and options.strategy == "auto" and world_size > 1 and every_gpu:
        plan = replace(plan, strategy=plan_strategy(options, world_size, nodes, every_gpu, fits=fits(plan)))
    for inventory in inventories:
        if inventory.torch:
            releases.check_plan(inventory.torch, plan.strategy, binds=bool(options.numa_binding))
    return plan


def _selected(
    options: Options, inventories: Sequence[Inventory], busy: Mapping[str, str], own: set[int]
) -> Sequence[Inventory]:
    """The hosts to plan for, with the GPUs of ``--gpu-type``; of ``--remote`` as few hosts as will do."""
    if options.gpu_type is not None:
        inventories = with_gpus_of_type(options.gpu_type, inventories, leave_out=options.remote)
    if options.remote and len(inventories) > 1:
        room = [len(free_of(one.gpus, busy, own)) if options.ranks is None else one.cores for one in inventories]
        inventories = as_few_as_will_do(options.ranks or options.gpus, inventories, room)
    return inventories


def _placed(
    options: Options, inventories: Sequence[Inventory], busy: Mapping[str, str], own: set[int]
) -> tuple[list[int], list[tuple[Gpu, ...]]]:
    """How many ranks each node has, and on which GPUs."""
    gpus: list[tuple[Gpu, ...]] = [() for _ in inventories]
    if options.ranks is None:
        gpus = _gpus_of_each(options.gpus, inventories, busy, own)
        counts = [len(chosen) for chosen in gpus]
    else:
        counts = places(options.ranks, inventories, [options.ranks for _ in inventories])
        if not (options.plan and options.strategy):  # --plan with a strategy may be for another machine
            for count, inventory in zip(counts, inventories, strict=True):
                _check_cpu(count, inventory)
    if options.numa_binding:
        for chosen, inventory in zip(gpus, inventories, strict=True):
            _check_binding(chosen, inventory)
    return counts, gpus


def _check_range(options: Options, hosts: int) -> None:
    least, most = options.least_nodes, options.nodes
    if least is not None and most != hosts:
        raise OptionError(
            f"--nodes {least}:{most}, but the job has {hosts} hosts", f"write --nodes {min(least, hosts)}:{hosts}"
        )


def _nodes(
    counts: Sequence[int], gpus: Sequence[tuple[Gpu, ...]], inventories: Sequence[Inventory]
) -> tuple[NodePlan, ...]:
    """Ranks are numbered node by node. On several nodes, only the first one's address is decided here."""
    nodes: list[NodePlan] = []
    for index, (count, chosen, inventory) in enumerate(zip(counts, gpus, inventories, strict=True)):
        first = sum(counts[:index])
        node = NodePlan(
            name=f"node{index}",
            ranks=tuple(range(first, first + count)),
            gpus=tuple(gpu.uuid for gpu in chosen),
            gpu_numbers=tuple(gpu.index for gpu in chosen if not is_open(gpu.uuid)),
            host=inventory.host,
            threads=max(1, inventory.cores // count),
            reach=inventory.reach,
        )
        if len(counts) > 1:
            node = replace(node, address=_address(inventory) if index == 0 else "", interface="")
        nodes.append(node)
    return tuple(nodes)


def _address(inventory: Inventory) -> str:
    if not inventory.addresses:  # an engine that leaves it open has an empty one
        raise ResourceError(
            f"{inventory.host} has no address that other hosts could reach, only loopback",
            "name a host with a network first in --hosts",
        )
    return inventory.addresses[0]


def _check_software(inventory: Inventory, inventories: Sequence[Inventory]) -> None:
    """Raises ``ResourceError`` for a torch that is not supported."""
    if not inventory.torch:
        return
    try:
        releases.check(inventory.torch)
    except ResourceError as error:
        if len(inventories) > 1 or inventory.reach.python:
            hint = install(inventory, f"torch>={releases.words(releases.OLDEST)}")
            raise ResourceError(f"{inventory.host}: {error.message}", hint) from None
        raise


def _gpus_of_each(
    wanted: int | None, inventories: Sequence[Inventory], busy: Mapping[str, str], own: set[int]
) -> list[tuple[Gpu, ...]]:
    if len(inventories) == 1:
        slots = inventories[0].slots
        return [_choose(wanted if slots is None else slots, inventories[0], busy, own)]
    free = [len(free_of(inventory.gpus, busy, own)) for inventory in inventories]
    counts = places(wanted, inventories, free)
    return [_choose(count or None, inventory, busy, own) for count, inventory in zip(counts, inventories, strict=True)]


def _check_cpu(ranks: int, inventory: Inventory) -> None:
    most = inventory.cores * OVERSUBSCRIPTION_LIMIT
    if ranks > most:
        raise ResourceError(
            f"{ranks} ranks on {inventory.cores} cores of {inventory.host} are too many: "
            f"{-(-ranks // inventory.cores)} ranks would share one core",
            f"ask for at most --ranks {most} here",
        )
    if inventory.memory and ranks * RANK_MEMORY > inventory.memory:
        raise ResourceError(
            f"{ranks} ranks need at least {ranks * RANK_MEMORY / 1024**3:.1f} GiB; "
            f"{inventory.host} has {inventory.memory / 1024**3:.1f} GiB free",
            f"ask for at most --ranks {max(1, inventory.memory // RANK_MEMORY)}",
        )


def _check_binding(gpus: Collection[Gpu], inventory: Inventory) -> None:
    if not gpus:
        raise ResourceError(
            "--numa-binding pins each rank to the cores near its GPU, but CPU ranks have no GPU",
            "leave it out, or ask for --gpus",
        )
    if not inventory.numactl:
        raise ResourceError(
            f"--numa-binding: PyTorch needs the program numactl, which is not installed on {inventory.host}",
            "install the system's package numactl there, or leave --numa-binding out",
        )


def _choose(wanted: int | None, inventory: Inventory, busy: Mapping[str, str], own: set[int]) -> tuple[Gpu, ...]:
    if not inventory.gpus:
        count = wanted or 2
        raise ResourceError(
            f"{inventory.host} has no GPU that this kernel can use",
            f"--ranks {count} runs the cell on {count} CPU ranks, as a rehearsal",
        )
    free = free_of(inventory.gpus, busy, own)
    if wanted is not None and wanted > len(inventory.gpus):
        raise ResourceError(
            f"--gpus {wanted}: {inventory.host} has {_gpus(len(inventory.gpus))} ({_names(inventory.gpus)})",
            f"--gpus {len(inventory.gpus)}, or --ranks {wanted} for a rehearsal on the CPU",
        )
    if len(free) < (wanted or 1):
        raise ResourceError(
            f"{len(free)} of {_gpus(len(inventory.gpus))} are free: {occupants(inventory.gpus, busy, own)}",
            "end the jobs that use them: `%dist cancel JOB`, --replace; on this machine --wait waits",
        )
    # GPUs without processes come before a GPU that the kernel itself uses.
    free.sort(key=lambda gpu: not gpu.idle)
    return tuple(sorted(free[: wanted or len(free)], key=lambda gpu: gpu.index))


def usable(options: Options, inventory: Inventory) -> tuple[Gpu, ...]:
    """The GPUs of this machine that ``--gpu-type`` leaves, taken ones too. Raises ``ResourceError`` for none."""
    if options.gpu_type is None:
        return inventory.gpus
    return with_gpus_of_type(options.gpu_type, [inventory], leave_out=False)[0].gpus


def free_of(gpus: Sequence[Gpu], busy: Mapping[str, str], own: Collection[int]) -> list[Gpu]:
    """Those that no job has and no process uses, except ``own``."""
    return [gpu for gpu in gpus if not (gpu.job or gpu.uuid in busy) and set(gpu.pids) <= set(own)]


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _names(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(dict.fromkeys(gpu.name for gpu in gpus))


def occupants(gpus: Sequence[Gpu], busy: Mapping[str, str], own: Collection[int]) -> str:
    """``GPU 0 has job 20260102-030405-0a0b0c; GPU 1 has process 4711 (2.0 GiB)``."""
    words = []
    for gpu in gpus:
        if job := busy.get(gpu.uuid, gpu.job):
            words.append(f"GPU {gpu.index} has job {job}")
        elif strangers := set(gpu.pids) - set(own):
            pids = ", ".join(str(pid) for pid in sorted(strangers))
            words.append(f"GPU {gpu.index} has process {pids} ({gpu.memory_used / 1024**3:.1f} GiB)")
    return "; ".join(words)
