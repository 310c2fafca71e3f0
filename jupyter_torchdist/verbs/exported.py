"""``export``: a job as plain files that need nothing of this package."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from ..client.job import attach
from ..protocol.errors import LaunchError, UserError
from ..protocol.paths import home
from .schema import Exported


def export(arguments: argparse.Namespace) -> Exported:
    """Write the job. Raises ``UserError`` for a directory that is not empty."""
    job = attach(arguments.job)
    directory = Path(arguments.directory).expanduser().absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not an empty directory", "name a new directory")
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    module = f"{__package__.partition('.')[0]}.exporting.writing"
    command = [sys.executable, "-m", module, str(job.paths.root), str(home().blobs), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout.strip().rpartition("\n")[2] or "{}") if done.returncode == 0 else {}
    if "notes" not in answer:
        shutil.rmtree(directory) if made else _empty(directory)
        if "error" in answer:
            raise UserError(answer["error"], answer["hint"])
        raise LaunchError(f"job {job.id} could not be exported", done.stderr.strip()[-2000:])
    return Exported(str(directory), tuple(answer["notes"]))


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
