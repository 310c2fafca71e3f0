"""The rank's own end: exceptions, signals, exit codes, the scheduler."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "user-exception",
        Order.OWN,
        "{who} raised {error}.",
        "The program raised it on that rank; the other ranks were ended because of it.",
        "Mend the program at that line. The same rows on one process show the same error faster.",
    ),
    Kind(
        "dataloader-killed",
        Order.OWN,
        "{who} lost a DataLoader worker: {reason}.",
        "The worker was killed (memory of the host), or crashed.",
        "Fewer num_workers, smaller samples in memory; num_workers=0 shows an exception's own line.",
        (
            (
                r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?P<reason>is killed by signal: (?!Bus error)[\w ]+"
                r"|exited unexpectedly.{0,60})"
            ),
        ),
    ),
    Kind(
        "disk-full",
        Order.OWN,
        "{who} has no room left on a disk.",
        "The disk of the checkpoint, the cache or /tmp is full.",
        "`df -h` and `df -i` on that node.",
        (r"OSError: \[Errno 28\] No space left on device", r"[Dd]isk quota exceeded"),
    ),
    Kind(
        "host-oom-kill",
        Order.EXIT,
        "{who} was killed by SIGKILL without a word of its own.",
        "Most often the kernel or the container's limit took it for its memory; an operator or the scheduler can send "
        "the same signal.",
        "`dmesg | grep -i oom` on that node, or the container's OOMKilled. Fewer DataLoader workers, less data in "
        "memory, a higher limit.",
        (
            r"OOMKilled",
            r"[Oo]ut [Oo]f [Mm]emory: Killed process",
            r"oom[-_]kill(?:er)?\b",
            r"exited on signal 9",
            r"Killed\s*$",
        ),
    ),
    Kind(
        "time-limit",
        Order.OWN,
        "The scheduler ended the job: its time limit was reached.",
        "The job ran longer than it may.",
        "A longer limit (`--time`), or save checkpoints and go on from the last one.",
        (r"CANCELLED AT \S+ DUE TO TIME LIMIT", r"DUE TO TIME LIMIT"),
    ),
    Kind(
        "node-failed",
        Order.OWN,
        "A node failed while the job ran: {reason}.",
        "The scheduler lost the node.",
        "Look at the node; start again from the last checkpoint.",
        (r"DUE TO NODE FAILURE(?P<reason>.{0,60})", r"(?P<reason>[Nn]ode failure on \S+)"),
    ),
    Kind(
        "rank-exited",
        Order.EXIT,
        "{who} ended with {error} and left no message.",
        "The program called exit, a library ended the process, or it crashed in native code.",
        "Look for the last lines of that rank. `python -X faulthandler` prints the stack of a crash.",
        (
            r"exited with exit code (?P<code>[1-9]\d*)",
            r"Fatal Python error: (?!Segmentation)",
        ),
    ),
    Kind(
        "segfault",
        Order.EXIT,
        "{who} crashed in native code (SIGSEGV).",
        "An extension, a driver or two libraries that do not fit each other.",
        "`python -X faulthandler` prints the stack. The same versions of torch, CUDA and extensions on all nodes.",
        (r"Segmentation fault", r"SIGSEGV", r"exited on signal 11"),
    ),
    Kind(
        "checkpoint-mismatch",
        Order.OWN,
        "{who} loaded weights that do not fit the model.",
        "The checkpoint was written by another model, another parallel layout, or is cut off.",
        "Compare names and shapes of checkpoint and model; the same parallel sizes as when it was written.",
        (
            r"Error\(s\) in loading state_dict",
            r"size mismatch for [\w.]+: copying a param",
            r"PytorchStreamReader failed",
            r"Missing key\(s\) in state_dict",
        ),
    ),
    Kind(
        "not-divisible",
        Order.OWN,
        "{who} got sizes that do not divide: {reason}.",
        "A parallel size does not divide the number of ranks, or a size of the model.",
        "Parallel sizes whose product is the number of ranks, and that divide heads, layers and hidden size.",
        (r"Error: (?P<reason>.{0,80}(?:is not|not|must be|should be|isn't) (?:evenly )?divisible by.{0,60})",),
    ),
)
