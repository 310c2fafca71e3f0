"""Writes the files of an exported job, in an interpreter of its own whose ``__main__`` gets the captured names."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import types
from importlib import metadata
from pathlib import Path

from ..marshal import load_bundle
from ..protocol.bundle import Manifest
from ..protocol.errors import TorchDistError, UserError
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.spec import PROGRAMS, JobSpec
from ..store.jobdir import read_manifest, read_plan, read_spec
from . import program

US = "jupyter_torchdist"


def write(paths: JobPaths, blobs: Path, directory: Path) -> list[str]:
    """Write the job into ``directory``, which is empty. Returns notes. Raises ``UserError``, ``StoreError``."""
    spec, plan, manifest = read_spec(paths), read_plan(paths), read_manifest(paths)
    texts: dict[str, str] = json.loads((blobs / manifest.linecache.digest).read_bytes())
    notes: list[str] = []
    if spec.kind in PROGRAMS:
        command = _program(spec, directory, notes)
    else:
        notes += _code(spec, plan, manifest, texts, (paths, blobs, directory))
        command = ["train.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in directory.glob("train.py"))
    if US in text and plan.strategy.name == "none":
        notes.append(f"the code uses {US}: install it there, too (`pip install {US}`)")
    launch = _launch_lines(spec, plan, command)
    if plan.strategy.name != "none":
        notes.append(
            f"--strategy {plan.strategy.name} changed this training while it ran. "
            f"Without {US} each rank trains alone; with it: `{launch['ours']}`"
        )
    (directory / "run.sh").write_text(f'#!/bin/sh\ncd "$(dirname "$0")"\nexec {launch["torchrun"]} "$@"\n')
    (directory / "run.sh").chmod(0o755)
    (directory / "job.sbatch").write_text(launch["sbatch"])
    (directory / "requirements.txt").write_text("\n".join(_installed()) + "\n")
    (directory / "README.md").write_text(_readme(spec, plan, manifest, launch, notes), encoding="utf-8")
    return notes


def _code(
    spec: JobSpec, plan: Plan, manifest: Manifest, texts: dict[str, str], places: tuple[JobPaths, Path, Path]
) -> list[str]:
    paths, blobs, directory = places
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    load_bundle(manifest, blobs, main, source_dir=paths.source)
    names = {
        name: value
        for name, value in vars(main).items()
        if name in manifest.names and name.isidentifier() and name != program.CALL
    }
    body = spec.source
    if spec.kind == "function":
        body = program.body_of_call(vars(main)[program.CALL], names)
    parts = program.Parts(main, texts)
    parts.take(names)
    text = program.text_of(spec, plan, parts, body)
    try:
        compile(text, "train.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise UserError(
            f"the cell cannot be written as a plain script: {error.msg}: {line}",
            "a !command, a magic and a top-level await need a notebook; move them out of the cell",
        ) from None
    (directory / "train.py").write_text(text, encoding="utf-8")
    program.write_data(parts, directory)
    if manifest.sources:
        shutil.copytree(paths.source, directory / "source")
    return parts.notes


def _program(spec: JobSpec, directory: Path, notes: list[str]) -> list[str]:
    """The words after torchrun's options."""
    if spec.kind == "script":
        (directory / "train.py").write_text(spec.source, encoding="utf-8")
        notes.append("a script finds a process group under torchdist, but none under torchrun: it must make its own")
        return ["train.py", *spec.argv[1:]]
    if spec.kind == "module":
        notes.append(f"the module {spec.source} is not copied: it must be installed there")
        return ["-m", spec.source, *spec.argv[1:]]
    notes.append(f"the command {spec.argv[0]} is not copied")
    return ["--no-python", *spec.argv]


def _launch_lines(spec: JobSpec, plan: Plan, command: list[str]) -> dict[str, str]:
    program_words = shlex.join(command)
    each = len(plan.nodes[0].ranks)
    gpus = bool(plan.nodes[0].gpus)
    count = f"--gpus {plan.world_size}" if gpus else f"--ranks {plan.world_size}"
    ours = f"torchdist run {count} --strategy {plan.strategy.name} {program_words}"
    alone = f"torchrun --standalone --nproc-per-node {each} {program_words}"
    many = (
        f"torchrun --nnodes $SLURM_NNODES --nproc-per-node {each} --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID "
        f"--rdzv-endpoint $HEAD:29500 {program_words}"
    )
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={spec.options.name or spec.job}",
        f"#SBATCH --nodes={len(plan.nodes)}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={each}"] if gpus else []),
        f"#SBATCH --cpus-per-task={each * plan.nodes[0].threads}",
        "",
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun {many}",
    ]
    return {"ours": ours, "torchrun": alone, "sbatch": "\n".join(lines) + "\n", "many": many}


def _installed() -> list[str]:
    found = {(one.metadata["Name"], one.version) for one in metadata.distributions() if one.metadata["Name"]}
    return sorted((f"{name}=={version}" for name, version in found if name != US), key=str.lower)


def _readme(spec: JobSpec, plan: Plan, manifest: Manifest, launch: dict[str, str], notes: list[str]) -> str:
    rows = [f"| `{one.name}` | {one.kind} | {one.what} |" for one in manifest.receipt if not one.name.startswith("__")]
    nodes = "a machine" if len(plan.nodes) == 1 else f"each of {len(plan.nodes)} machines"
    return "\n".join(
        [
            f"# {spec.label}, job {spec.job}",
            "",
            f"{plan.world_size} ranks, {plan.backend}, Python {manifest.python}. On {nodes}:",
            "",
            "```",
            "pip install -r requirements.txt",
            launch["torchrun"] if len(plan.nodes) == 1 else launch["many"],
            "```",
            "",
            "With Slurm: `sbatch job.sbatch`.",
            "",
            *(["## To know", "", *(f"* {note}" for note in notes), ""] if notes else []),
            *(["## What the notebook gave", "", "| name | kind | |", "|---|---|---|", *rows, ""] if rows else []),
        ]
    )


def main() -> int:
    """``python -m … JOB_DIRECTORY BLOBS DIRECTORY``: prints notes, or an error with its hint, as JSON."""
    root, blobs, directory = map(Path, sys.argv[1:4])
    try:
        answer: dict[str, object] = {"notes": write(JobPaths(root), blobs, directory)}
    except TorchDistError as error:
        answer = {"error": error.message, "hint": error.hint}
    print(json.dumps(answer), file=sys.__stdout__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
