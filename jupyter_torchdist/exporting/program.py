"""``train.py`` of a job: imports, definitions, captured data, then what the job ran."""

from __future__ import annotations

import io
import pickle
import pickletools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from .definitions import Definition, definition_of, import_of, likely_import, used_at_once

CALL = "__torchdist_call__"
US = "jupyter_torchdist"


@dataclass
class Parts:
    """The captured names of a job, by how they are written. ``main`` is the module that pickles refer to."""

    main: types.ModuleType
    texts: Mapping[str, str]
    """The cells' text by their labels."""
    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, Definition] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """Values without classes of the notebook: they are loaded before the definitions."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Values with such classes: they are loaded after the definitions, from one pickle, and stay connected."""
    notes: list[str] = field(default_factory=list)

    def take(self, names: Mapping[str, Any]) -> None:
        """Decide how each name is written, and each function and class that these need."""
        for name, value in names.items():
            if line := import_of(name, value):
                self.imports[name] = line
            elif not self.define(name, value):
                self._pickle(name, value)
        for name in self._needed():
            if line := likely_import(name):
                self.imports[name] = line
            else:
                self.notes.append(f"{name} is used where something is defined, and is not known: add it to train.py")

    def define(self, name: str, value: Any) -> bool:
        """Write a function or class of the notebook as source, its bases too. False if there is no source."""
        if name in self.definitions:
            return True
        definition = definition_of(name, value, self.texts)
        if definition is None:
            return False
        self.definitions[name] = definition
        setattr(self.main, name, value)
        for base in getattr(value, "__mro__", ())[1:]:
            if base.__module__ == "__main__":
                self.define(base.__name__, base)
        return True

    def _needed(self) -> list[str]:
        given = {*self.imports, *self.definitions, *self.data}
        used = {name for one in self.definitions.values() for name in used_at_once(one.text)}
        return sorted(used - given)

    def _pickle(self, name: str, value: Any) -> None:
        pickler = _Plain(io.BytesIO(), self)
        try:
            pickler.dump(value)
        except Exception as error:  # noqa: BLE001  # the user's own reducers run here and may raise anything
            self.notes.append(f"{name} could not be written as plain data: {type(error).__name__}: {error}")
            return
        words = [word for _, word, _ in pickletools.genops(pickler.file.getvalue()) if isinstance(word, str)]
        if any(word.split(".")[0] == US for word in words):
            self.notes.append(f"{name} needs the package {US} where it is loaded")
        (self.objects if pickler.of_the_notebook else self.data)[name] = value


class _Plain(pickle.Pickler):
    """Pickles as any Python does, and has the functions and classes of the notebook defined."""

    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        super().__init__(file)
        self.file, self._parts = file, parts
        self.of_the_notebook = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__":
            self.of_the_notebook = True
            self._parts.define(value.__name__, value)
        return NotImplemented


def text_of(spec: JobSpec, plan: Plan, parts: Parts, body: str) -> str:
    """The text of ``train.py`` with ``body`` at its end."""
    ordered = sorted(set(parts.definitions.values()))
    written = "\n\n\n".join(definition.text for definition in ordered)
    own_group = "init_process_group" in body + written
    imports = sorted(dict.fromkeys(parts.imports.values()), key=lambda line: (line.startswith("from"), line))
    sections = [
        f'"""{spec.label} of job {spec.job}, written by `%dist export`. README.md says how to run it."""',
        "import os\nimport pathlib\nimport pickle\nimport sys\n\nimport torch\nimport torch.distributed",
        "_here = pathlib.Path(__file__).resolve().parent\nsys.path.insert(0, str(_here / 'source'))",
        "" if own_group else _group(plan),
        "\n".join(imports),
        _load("data.pkl") if parts.data else "",
        written,
        _load("objects.pkl") if parts.objects else "",
        body.rstrip(),
        "" if own_group else "if torch.distributed.is_initialized():\n    torch.distributed.destroy_process_group()",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def write_data(parts: Parts, directory: Path) -> None:
    """Write ``data.pkl`` and ``objects.pkl`` where there is something to write."""
    for name, values in (("data.pkl", parts.data), ("objects.pkl", parts.objects)):
        if values:
            (directory / name).write_bytes(pickle.dumps(values))


def body_of_call(call: tuple[Any, ...], names: dict[str, Any]) -> str:
    """The call of a function. Its arguments become names in ``names``."""
    function, args, kwargs = call
    name = str(getattr(function, "__name__", "function"))
    names[name] = function
    given = []
    for number, value in enumerate(args):
        names[f"argument_{number}"] = value
        given.append(f"argument_{number}")
    for key, value in kwargs.items():
        names[f"argument_{key}"] = value
        given.append(f"{key}=argument_{key}")
    return f"value = {name}({', '.join(given)})\nprint(value)"


def _load(name: str) -> str:
    return f"with open(_here / '{name}', 'rb') as _file:\n    globals().update(pickle.load(_file))"


def _group(plan: Plan) -> str:
    lines = ["if 'RANK' in os.environ:  # started by torchrun"]
    if plan.backend == "nccl":
        lines.append("    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))")
    return "\n".join([*lines, f"    torch.distributed.init_process_group('{plan.backend}')"])
