"""A notebook and a rank for tests of capture and marshal: real bundles, a real second interpreter.

The interpreter is started once a session; it imports torch and forks a rank for every crossing, so that a test
costs milliseconds and no rank sees what another one did.
"""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import marshal
from jupyter_torchdist.capture import Capture, capture_cell, pack
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.bundle import Manifest
from jupyter_torchdist.protocol.events import ErrorRecord
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.store.blobs import BlobStore

RANKS = """
import json, linecache, os, sys, traceback, types
from pathlib import Path
try:
    import torch._dynamo  # as a warm rank has; the first optimizer would import it, in each fork again
except ImportError:  # another Python
    pass
from jupyter_torchdist import marshal
from jupyter_torchdist.capture import CALL
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.bundle import Manifest
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.ranks.module_attributes import ModuleAttributes
from jupyter_torchdist.usercode.source import remember_cell

def rank(job, source, label, line, number, path):
    sys.path[:0] = path
    paths = JobPaths(Path(job))
    manifest = Manifest.from_json(codec.loads(paths.manifest.read_bytes()))
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    loaded = marshal.load_bundle(manifest, paths.root.parent.parent / "blobs", main)
    answer = {"memo": len(loaded.memo), "notes": []}
    before = set(vars(main))
    attributes = ModuleAttributes(vars(main), manifest.bound, answer["notes"].append)
    try:
        if CALL in manifest.names:
            function, args, kwargs = vars(main)[CALL]
            main.value = function(*args, **kwargs)
            bound = ["value"]
        else:
            padded = "\\n" * (line - 1) + source
            remember_cell(source, label, line)
            exec(compile(padded, label, "exec", manifest.flags, True), vars(main))
            bound = list(manifest.bound)
    except BaseException as error:
        marshal.dump_exception(error, loaded, paths.error(number))
        frames = traceback.extract_tb(error.__traceback__)
        answer["frames"] = [[frame.filename, frame.lineno, frame.name, frame.line] for frame in frames]
        bound = []
    changed = marshal.changed_names(loaded, main)
    new = [name for name in vars(main) if name not in before | {"__builtins__"} and name.isidentifier()]
    wanted = {name: vars(main)[name] for name in dict.fromkeys([*bound, *changed, *new]) if name in vars(main)}
    gone = [name for name in loaded.names if name.isidentifier() and name not in vars(main) and name != CALL]
    wanted.update(dict.fromkeys(gone, marshal.attributes.Absent))
    of_modules = attributes.now()
    known = marshal.changed_names(loaded, of_modules)
    wanted.update({name: value for name, value in of_modules.items() if name in known or name not in loaded.names})
    dumped = marshal.dump_results(wanted, loaded, paths, number)
    answer.update(changed=changed, names=dumped.names, left=dumped.left, size=dumped.size)
    return answer

answers = os.dup(1)
os.dup2(2, 1)  # some releases of torch print there
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        try:
            answer = rank(**request)
        except BaseException:
            answer = {"crash": traceback.format_exc()}
        os.write(answers, (json.dumps(answer) + "\\n").encode())
        os._exit(0)
    os.waitpid(pid, 0)
"""


class Ranks:
    """The second interpreter. ``python``: another one than ours, and the folder of what it needs."""

    def __init__(self, python: Path = Path(sys.executable), packages: Path | None = None) -> None:
        root = str(Path(__file__).parent.parent)
        path = os.pathsep.join([root, str(packages)] if packages else [root])
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [python, "-c", RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "crash" not in answer, answer["crash"]
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=20)


@dataclass
class Notebook:
    """A namespace, cells executed in it, and cells that run on a rank."""

    home: Path
    ranks: Ranks
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__", "__builtins__": __builtins__})
    labels: dict[str, str] = field(default_factory=dict)
    count: int = 0
    rank_path: list[str] = field(default_factory=list)
    """What the rank's ``sys.path`` begins with, besides the bundle's source directory."""
    captured: Capture | None = None
    manifest: Manifest | None = None
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def paths(self) -> JobPaths:
        """Files of the last job."""
        return Home(self.home).job(f"job-{self.count}")

    @property
    def store(self) -> BlobStore:
        return BlobStore(Home(self.home))

    def cell(self, source: str) -> None:
        """An ordinary cell."""
        self.count += 1
        file = f"/tmp/ipykernel_0/{self.count}.py"
        self.labels[file] = f"Cell In[{self.count}]"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", 0, True), self.names)

    def capture(self, source: str, **options: Any) -> Capture:
        """What a cell under the magic would take along."""
        self.count += 1
        options = {"cwd": Path.cwd(), "labels": self.labels, **options}
        return capture_cell(source, f"Cell In[{self.count}]", 2, self.names, **options)

    def run(self, source: str, **options: Any) -> marshal.Values:
        """A cell under the magic, on one rank; what comes back is assigned."""
        found = self.bring(self.send(source, **options))
        self.names.update(found)
        for name in found.deleted:
            self.names.pop(name, None)
        return found

    def send(self, source: str, **options: Any) -> Capture:
        """The first half of ``run``: nothing is brought back yet."""
        self.captured = self.capture(source, **options)
        self.launch(self.captured, source)
        return self.captured

    def launch(self, captured: Capture, source: str = "", rank: int = 0) -> None:
        self.manifest = pack(captured, self.paths.job, self.store.put)
        self.paths.root.mkdir(parents=True)
        self.paths.manifest.write_text(codec.dumps(self.manifest.to_json()))
        self.again(source, rank)

    def again(self, source: str, rank: int = 0) -> None:
        """Run the last bundle, as another rank of the job."""
        self.answer = self.ranks.ask(
            job=str(self.paths.root),
            source=source,
            label=f"Cell In[{self.count}]",
            line=2,
            number=rank,
            path=self.rank_path,
        )

    def bring(self, captured: Capture | None, rank: int = 0) -> marshal.Values:
        memo = captured.memo if captured else None
        values = marshal.load_results(self.paths, rank, memo, self.names)
        assert marshal.attributes.write_back(marshal.attributes.take(values)) == ()
        return values

    def error(self, memo: Mapping[int, Any] | None = None) -> BaseException:
        """The exception of the last cell."""
        record = ErrorRecord("Unknown", "builtins", "text from the record", "the whole traceback")
        known = memo if memo is not None else self.captured.memo if self.captured else None
        return marshal.load_exception(self.paths.error(0), known, self.names, record)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.fixture
def notebook(home: Path, ranks: Ranks) -> Notebook:
    return Notebook(home, ranks)
