"""Writes the generated parts of the pages in ``docs``: tables of options, and every refusal with its remedy.

``python -m scripts.docs_pages`` writes them, ``--check`` says which of them are old and exits with 1. A page marks a
place with ``<!-- options -->`` … ``<!-- options: end -->``, or ``<!-- options: fsdp -->`` for one strategy or
launcher; what ``--json`` prints stands between ``<!-- json -->`` and ``<!-- json: end -->``
(``scripts/json_pages.py``); the pages of ``docs/refusals`` are written whole.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from jupyter_torchdist.diagnosis.catalogue import (
    collectives,
    fabric,
    gpu,
    network,
    process,
    rendezvous,
    stalls,
    stragglers,
    training,
    unclear,
)
from jupyter_torchdist.protocol.options import launcher
from jupyter_torchdist.protocol.options.strategy import explained, options_of
from jupyter_torchdist.protocol.spec import OPTIONS
from jupyter_torchdist.protocol.strategy import NAMES

from . import json_pages
from .messages import ROOT, Message, cell, messages

DOCS = ROOT / "docs"

GROUPS = {
    "where": "Where it runs",
    "how": "How it trains",
    "data": "What goes along, what comes back",
    "life": "How long it lives",
    "look": "What is shown",
}

LAYERS = {
    process: "The rank's own end",
    gpu: "CUDA, the driver, the card",
    network: "NCCL's sockets",
    fabric: "InfiniBand, shared memory, NVLink",
    rendezvous: "How ranks find each other",
    collectives: "Ranks that do different things",
    training: "The training itself",
    stalls: "A job that stalls",
    stragglers: "Ranks that slow the others",
    unclear: "Errors that name no cause",
}

_HOW_TO_DIAGNOSE = """
`torchdist diagnose` reads the log files of any distributed PyTorch job and says why it failed. The job need not be
ours: a Slurm output, the files of several nodes, a pasted issue, packed by gzip or not.

```shell
torchdist diagnose slurm-4711.out          # one file
torchdist diagnose node1.log node2.log.gz  # all nodes at once: the first failure is found among them
kubectl logs -l job=train --prefix | torchdist diagnose -
torchdist diagnose logs/ nccl_trace_rank_* # a directory; dumps of PyTorch's flight recorder
torchdist diagnose JOB                     # a job of ours, with its exceptions, exit codes and recorders
```

In a notebook it is `%dist diagnose`. [`--json`](programs.md) is for programs.

A finding has a code, one sentence with the rank and the host where the logs tell them, the cause, what to do, and the
lines that show it. The first finding is the cause. What one rank's end does to the others (a connection that is reset,
SIGTERM by `torchrun`, their time-outs) is never named as the cause when the logs hold a better one. Where they do not
decide, the finding says so. Logs of a job that went well give no finding; a slow transport is a warning.

The order of judgement: the rank's own exception, GPU or exit; NCCL's warnings; rendezvous and store; flight recorders
and time-outs of collectives, compared over the ranks.

## What ranks record

PyTorch's flight recorder keeps the last collectives of each rank: operation, size, type, group, the line of the
program, and whether it has ended. The recorders of all ranks together say which rank did not come to a collective, and
which ranks called something else, in another order, or less often.

* In a job of ours the recorder is on. A rank dumps it when ranks wait for long, when another rank has failed, when it
  fails itself, and when its code has ended. The dumps are `rank-*.recorder` in the job's directory.
  `TORCH_FR_BUFFER_SIZE=0` switches the recorder off.
* NCCL's warnings are in files of their own, `rank-*.nccl.*`, with NCCL's details after the first one. If you set
  `NCCL_DEBUG`, NCCL prints into the logs of the ranks as usual.
* Under `torchrun`, NCCL's watchdog dumps at a time-out: `/tmp/nccl_trace_rank_*`, or the prefix in
  `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`. Give the files of all ranks. They are pickles: one that could run code is refused.
  The JSON of Gloo's recorder is read, too. A dump's file name ends with its rank.
* In the tab [Communication](view.md#communication), *Record now* has the ranks of a running job dump their recorders. A
  time line shows when each rank entered its last collectives.
* While ranks use GPUs, NVML is asked every two seconds for errors of the memory, Xids, and what slows the GPU down.
  A GPU that fails is a finding while the job runs, and after it has failed. This was not run on a GPU.

NCCL, InfiniBand and GPU messages are known from NCCL's source and from public issues. They were not produced here.
""".strip().splitlines()

WRITTEN = "<!-- Written by `python -m scripts.docs_pages` from the package's source: change the message there. -->"


@dataclass(frozen=True)
class Section:
    """Messages of ``files`` (beginnings of paths in the package), under one reason."""

    title: str
    why: str
    files: tuple[str, ...]


PAGES: dict[str, tuple[str, str, tuple[Section, ...]]] = {
    "options": (
        "Options and files",
        "These errors come before anything starts. Nothing was captured and nothing runs.",
        (
            Section(
                "The line of `%%distribute`, `%dist` and `torchdist`",
                "An option has a name, and most have a value of one kind. What is unknown is refused with the nearest"
                " name, so that a spelling mistake never changes what runs.",
                (
                    "protocol/spec.py",
                    "protocol/options/",
                    "verbs/parse.py",
                    "verbs/diagnose.py",
                    "diagnosis/",
                    "cli.py",
                    "assistants/",
                    "client/world.py",
                ),
            ),
            Section(
                "Strategies, degrees and their options",
                "The degrees of a strategy multiply to the number of ranks. An option belongs to one or several"
                " strategies. A combination that cannot be right is refused here, not after an hour.",
                ("planning/strategy",),
            ),
            Section(
                "Configuration files",
                "Every key of a file is either honoured or refused by its name. A file never asks for something that"
                " silently does not happen.",
                (
                    "planning/configuration.py",
                    "planning/accelerate",
                    "planning/deepspeed",
                    "verbs/defaults.py",
                    "protocol/options/hosts",
                ),
            ),
            Section(
                "Options of `torchrun`",
                "`torchdist run` takes the options of `torchrun`. A value that an option cannot have is refused.",
                ("verbs/torchrun",),
            ),
            Section(
                "Functions, scripts and exported jobs",
                "A function is checked with its arguments, and a program is read and compiled, before anything starts.",
                (
                    "functions/",
                    "ranks/nested.py",
                    "ranks/ray_cluster.py",
                    "verbs/command_line.py",
                    "verbs/programs.py",
                    "kernel/programs.py",
                    "verbs/exported.py",
                    "export/",
                ),
            ),
            Section(
                "Releases of PyTorch",
                "An old release lacks what a strategy needs. The refusal names the first release that has it.",
                ("protocol/releases.py",),
            ),
        ),
    ),
    "capture": (
        "What goes along and what comes back",
        (
            "A cell leaves the notebook as a pickle, and its values come back as one. These errors say which object"
            " cannot cross, and where it is."
        ),
        (
            Section(
                "The cell",
                "The cell must compile, and each name that it reads must be defined in it or in the notebook.",
                ("capture/", "kernel/"),
            ),
            Section(
                "Objects",
                "Locks, sockets, open files and generators belong to one process. The message shows the path from the"
                " captured name to the object.",
                ("marshal/", "ranks/"),
            ),
        ),
    ),
    "strategies": (
        "Strategies",
        (
            "A strategy refuses a cell when it cannot give the result of a single device. It does so before the first"
            " optimizer step, so nothing is trained wrongly."
        ),
        (
            Section(
                "Models, optimizers and their calls",
                "The strategy replaces parameters and watches the calls of the model and its optimizer. Some calls"
                " need what a rank does not have.",
                ("strategies/auto.py", "strategies/backwards.py", "strategies/core/", "strategies/distributing.py"),
            ),
            Section(
                "`td.prepare` and `td.mesh`",
                "The explicit way changes what it is given, so each object is given once, and before it is used.",
                (
                    "strategies/explicit.py",
                    "strategies/prepared.py",
                    "strategies/preparing.py",
                    "strategies/training.py",
                    "strategies/loop/prepared_loader.py",
                ),
            ),
            Section(
                "The divided forward and its gradients",
                "Each rank computes a part of the batch. This is right only when the model treats each sample by"
                " itself, and when all ranks do the same steps.",
                ("strategies/analysis/", "strategies/step/", "strategies/sharded/"),
            ),
            Section(
                "Loops over loaders",
                "A loop that loads a part of each batch must stay as it was in the steps that were watched.",
                ("strategies/loop/",),
            ),
        ),
    ),
    "parallelisms": (
        "Parallelisms",
        (
            "Each parallelism divides another thing: the copies, the parameters, the layers, the sequence, the stages."
            " It refuses a model that cannot be divided so."
        ),
        (
            Section(
                "`ddp`",
                "Every rank has a copy of the model, and the gradients are averaged.",
                (
                    "strategies/parallel/replicate.py",
                    "strategies/parallel/zero1.py",
                    "strategies/parallel/batchnorm.py",
                ),
            ),
            Section(
                "`fsdp` and `hsdp`",
                "Each rank holds a shard of every parameter. Outside a module's forward a rank has only its shard.",
                ("strategies/parallel/fsdp.py",),
            ),
            Section(
                "`tp`",
                "Each rank holds a part of each layer. A plan says which layers are divided, and how.",
                ("strategies/parallel/tensor",),
            ),
            Section(
                "`cp`",
                "Each rank holds a part of the sequence inside the repeated blocks.",
                ("strategies/parallel/context_parallel.py", "strategies/parallel/sequences.py"),
            ),
            Section(
                "`pp`",
                "Each rank holds some of the layers. What one stage computes reaches another stage only through the"
                " inputs and outputs of the layers.",
                ("strategies/pipeline/",),
            ),
            Section(
                "Precision, compilation, activations",
                "These flags act on the repeated blocks of the model.",
                ("strategies/parallel/",),
            ),
        ),
    ),
    "deepspeed": (
        "DeepSpeed",
        "DeepSpeed's engine owns the optimizer step. The cell may not do what the engine does.",
        (
            Section(
                "The cell under DeepSpeed",
                "One engine trains one model with one optimizer, from its first step on.",
                ("strategies/deepspeed/",),
            ),
        ),
    ),
    "checkpoints": (
        "Checkpoints",
        "A checkpoint is loaded whole, on all ranks, or not at all. Nothing is changed before everything fits.",
        (
            Section(
                "Saving and loading",
                "The directory must be there, complete, and of the same model and optimizer.",
                ("checkpoint/",),
            ),
        ),
    ),
    "machine": (
        "This machine and its jobs",
        "These errors are not about the code of the cell.",
        (
            Section(
                "Ranks, GPUs and memory",
                "There is less than was asked for. The message says what there is.",
                ("planning/topology.py", "planning/placing.py", "planning/software.py", "planning/memory.py"),
            ),
            Section(
                "The data directory",
                "Jobs and captured data are files. They need space and rights, and they must not be changed by hand.",
                ("store/",),
            ),
            Section(
                "Jobs and processes",
                "A process of ours could not be started, or is gone.",
                ("client/", "driver/", "protocol/", "launchers/", "plugins/", "node/", "verbs/hosts.py"),
            ),
            Section(
                "Trackers",
                "The job cannot be recorded there.",
                ("trackers/", "verbs/tracked.py"),
            ),
        ),
    ),
}
"""Page → title, introduction, sections. The first section that a file fits takes its messages."""


def main(words: list[str]) -> int:
    new = pages()
    old = [page for page, text in new.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    if words == ["--check"]:
        for page in old:
            print(f"{page.relative_to(ROOT)} is old: run `python -m scripts.docs_pages`", file=sys.stderr)
        return 1 if old else 0
    for page in old:
        page.parent.mkdir(exist_ok=True)
        page.write_text(new[page], encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


def pages() -> dict[Path, str]:
    """Each page with a generated part, as it should be."""
    found = {**refusals(), DOCS / "diagnostics.md": _causes()}
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = re.sub(r"(<!-- options(?:: (\w+))? -->\n).*?(<!-- options: end -->)", _table, text, flags=re.DOTALL)
        new = re.sub(
            r"(?<=<!-- json -->\n).*?(?=<!-- json: end -->)", lambda _: json_pages.text(), new, flags=re.DOTALL
        )
        if new != text or "<!-- options" in text:
            found[page] = new
    return found


def _table(match: re.Match[str]) -> str:
    begin, strategy, end = match.groups()
    rows = _strategy_rows(strategy) if strategy else _rows()
    return "\n".join([begin, *rows, "", end]) if rows else begin + end


def _rows() -> list[str]:
    lines: list[str] = []
    for group, title in GROUPS.items():
        lines += [f"### {title}", "", "| option | meaning |", "|---|---|"]
        rows = [option for option in OPTIONS if option.group == group]
        lines += [f"| `{cell(f'{row.written} {row.metavar}'.strip())}` | {cell(row.help)} |" for row in rows]
        lines.append("")
    return lines[:-1]


def _strategy_rows(strategy: str) -> list[str]:
    """Of a strategy, or of a launcher."""
    rows = [(f"{row.begin}{row.metavar}", row.help) for row in launcher.options_of(strategy).values()]
    if strategy in NAMES:
        rows = [(f"{row.name}={row.metavar}", explained(row)) for row in options_of(strategy)]
    lines = [f"| `{cell(option)}` | {cell(text)} |" for option, text in rows]
    return ["| `-O` | meaning |", "|---|---|", *lines] if lines else []


def _causes() -> str:
    """The page of the catalogue of causes."""
    lines = ["# Diagnostics: why it failed", "", WRITTEN, "", *_HOW_TO_DIAGNOSE, ""]
    for layer, title in LAYERS.items():
        lines += [f"## {title}", ""]
        for kind in layer.KINDS:
            lines += [f"### `{kind.code}`", "", f"*{kind.said({})}*", ""]
            lines += [kind.cause, "", f"**What to do.** {kind.remedy}", ""]
    return "\n".join(lines)


def refusals() -> dict[Path, str]:
    """The pages of ``docs/refusals``. Raises ``LookupError`` for a message of a file that no section takes."""
    taken: dict[tuple[str, str], list[Message]] = {}
    for message in messages():
        if message.file != "testing.py":
            taken.setdefault(_place(message.file), []).append(message)
    folder = DOCS / "refusals"
    return {folder / f"{name}.md": _page(name, taken) for name in PAGES}


def _place(file: str) -> tuple[str, str]:
    fits = [
        (len(beginning), name, section.title)
        for name, (_, _, sections) in PAGES.items()
        for section in sections
        for beginning in section.files
        if file.startswith(beginning)
    ]
    if not fits:
        raise LookupError(f"{file} refuses something, and no section of scripts/docs_pages.py takes it")
    _, name, title = max(fits)
    return name, title


def _page(name: str, taken: dict[tuple[str, str], list[Message]]) -> str:
    title, introduction, sections = PAGES[name]
    lines = [f"# {title}", "", WRITTEN, "", introduction, ""]
    for section in sections:
        rows = {f"| {cell(row.text)} | {cell(row.hint) or '—'} |": None for row in taken.get((name, section.title), ())}
        lines += [f"## {section.title}", "", section.why, "", "| message | what to do |", "|---|---|", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
