"""Local modules travel as source; what is installed is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.capture import modules, sources
from jupyter_torchdist.protocol.errors import CaptureError
from tests import crossing
from tests.crossing import Notebook

ranks, notebook = crossing.ranks, crossing.notebook


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on ``sys.path`` whose modules are forgotten afterwards."""
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    before = set(sys.modules)
    yield root
    for name in set(sys.modules) - before:
        if str(root) in str(getattr(sys.modules[name], "__file__", "")) or name.startswith("td_"):
            del sys.modules[name]
    importlib.invalidate_caches()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_file_beside_the_notebook_and_what_it_imports(notebook: Notebook, project: Path) -> None:
    write(
        project,
        {
            "td_one.py": "import td_two\ndef f(x): return td_two.g(x) + 1",
            "td_two.py": "import json\ndef g(x):\n    from td_three import h\n    return h(x)",
            "td_three.py": "def h(x): return x * 10",
            "td_unused.py": "1 / 0",
        },
    )
    notebook.cell("import td_one\nfrom td_one import f as fun")
    captured = notebook.capture("a = fun(2)\nb = td_one.f(3)\nwhere = td_one.__file__")
    assert set(captured.sources) == {"td_one.py", "td_two.py", "td_three.py"}
    notebook.launch(captured, "a = fun(2)\nb = td_one.f(3)\nwhere = td_one.__file__")
    found = notebook.bring(captured)
    assert (found["a"], found["b"]) == (21, 31)
    assert found["where"] == str(notebook.paths.source / "td_one.py")


def test_packages_with_data_and_relative_imports(notebook: Notebook, project: Path) -> None:
    write(project, {
        "td_pkg/__init__.py": "from .sub.deep import Thing",
        "td_pkg/sub/__init__.py": "",
        "td_pkg/sub/deep.py": (
            "from pathlib import Path\nfrom .. import __name__ as top\nclass Thing:\n"
            "    def text(self): return top + (Path(__file__).parent / 'data.txt').read_text()"
        ),
        "td_pkg/sub/data.txt": "data",
        "td_pkg/__pycache__/x.pyc": "",
        "td_pkg/.git/config": "",
    })  # fmt: skip
    notebook.cell("from td_pkg import Thing\nthing = Thing()")
    source = "text = thing.text()\nother = Thing()"
    captured = notebook.send(source)
    assert set(captured.sources) == {
        "td_pkg/__init__.py",
        "td_pkg/sub/__init__.py",
        "td_pkg/sub/deep.py",
        "td_pkg/sub/data.txt",
    }
    found = notebook.bring(captured)
    assert found["text"] == "td_pkgdata"
    assert type(found["other"]) is notebook.names["Thing"]


def test_namespace_packages(notebook: Notebook, project: Path) -> None:
    write(project, {"td_ns/inner/mod.py": "value = 5"})
    notebook.cell("import td_ns.inner.mod as m")
    assert notebook.run("v = m.value")["v"] == 5


def test_a_submodule_reached_as_an_attribute(notebook: Notebook, project: Path) -> None:
    write(project, {"td_pkg2/__init__.py": "", "td_pkg2/a.py": "", "td_pkg2/b.py": "value = 6"})
    notebook.cell("import td_pkg2\nimport td_pkg2.b\ndef f(): return td_pkg2.b.value")
    assert notebook.run("v = f() + td_pkg2.b.value")["v"] == 12


def test_imports_of_the_cell_and_of_captured_functions(notebook: Notebook, project: Path) -> None:
    write(project, {"td_lazy.py": "value = 7", "td_cell.py": "value = 8"})
    notebook.cell("def f():\n    import td_lazy\n    return td_lazy.value")
    found = notebook.run("from td_cell import value\ntotal = f() + value")
    assert found["total"] == 15
    assert not {"td_lazy"} & set(sys.modules)


def test_a_module_beside_the_notebook_that_is_not_on_the_path(notebook: Notebook, tmp_path: Path) -> None:
    write(tmp_path / "nb", {"td_beside.py": "value = 9"})
    assert notebook.run("from td_beside import value\nv = value", cwd=tmp_path / "nb")["v"] == 9


def test_what_is_installed_stays_where_it_is(notebook: Notebook) -> None:
    notebook.cell("import numpy, json, torch, pytest, cloudpickle, jupyter_torchdist, os, sys, math")
    captured = notebook.capture("numpy, json, torch, pytest, cloudpickle, jupyter_torchdist, os, sys, math")
    assert captured.sources == {}


def test_an_editable_installation_is_local(notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "checkout" / "src", {"td_editable/__init__.py": "value = 3"})

    class Finder:  # as setuptools' and hatchling's editable hooks do
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name != "td_editable":
                return None
            from importlib.util import spec_from_file_location

            folder = tmp_path / "checkout" / "src" / "td_editable"
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert notebook.run("import td_editable\nv = td_editable.value")["v"] == 3


def test_large_files_of_a_package_stay(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "FILE_LIMIT", 100)
    write(project, {"td_big/__init__.py": "", "td_big/weights.bin": "x" * 200})
    local = modules.LocalSources(project)
    local.add(["td_big.sub"])
    assert set(local.found) == {"td_big/__init__.py"}
    assert "weights.bin" in local.notes[0]


def test_a_module_made_by_hand_travels_by_value(notebook: Notebook) -> None:
    notebook.cell(
        "import types\nmade = types.ModuleType('td_made')\nmade.value = 4\nexec('def f(): return value', made.__dict__)"
    )
    assert notebook.run("v = made.f()")["v"] == 4


def test_two_jobs_do_not_share_their_sources(notebook: Notebook, project: Path) -> None:
    write(project, {"td_changing.py": "value = 1"})
    assert notebook.run("import td_changing\nv = td_changing.value")["v"] == 1
    write(project, {"td_changing.py": "value = 22"})
    assert notebook.run("import td_changing\nv = td_changing.value")["v"] == 22


BY_PATH = (
    "import importlib.util\nspec = importlib.util.spec_from_file_location('td_cfg', {path!r})\n"
    "cfg = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(cfg)\nf = cfg.f"
)


@pytest.fixture
def by_path(notebook: Notebook, tmp_path: Path) -> Notebook:
    """A notebook with ``cfg``, a module loaded from a path that no import leads to, and ``f``, a function of it."""
    write(tmp_path, {"elsewhere/td_cfg.py": "LR = 0.5\nSEEN = []\nclass C:\n    def g(self): return f(1)\n"
                     "def f(x):\n    SEEN.append(x)\n    return x * LR"})  # fmt: skip
    notebook.cell(BY_PATH.format(path=str(tmp_path / "elsewhere" / "td_cfg.py")))
    return notebook


@pytest.mark.parametrize("source", ["cfg.LR = 2.0\na = cfg.f(3)\nb = f(4)", "b = f(2)\ncfg.LR = 2.0\na = cfg.f(3)"])
def test_a_module_loaded_by_its_path_has_one_namespace(by_path: Notebook, source: str) -> None:
    found = by_path.run(source)
    assert (found["a"], found["b"]) in ((6.0, 8.0), (6.0, 1.0))
    cfg = by_path.names["cfg"]
    assert cfg.LR == 2.0
    assert cfg.SEEN in ([3, 4], [2, 3])
    assert by_path.names["f"] is cfg.f
    assert "td_cfg" not in sys.modules


def test_a_function_alone_brings_its_modules_names(by_path: Notebook) -> None:
    by_path.cell("cfg.LR = 3.0\ndel cfg")
    assert by_path.run("b = f(4)\nc = type(f)")["b"] == 12.0


def test_a_class_of_a_module_loaded_by_its_path(by_path: Notebook) -> None:
    by_path.cell("thing = cfg.C()")
    found = by_path.run("cfg.LR = 7\na = thing.g()\nother = cfg.C()\nsame = type(thing) is cfg.C")
    assert (found["a"], found["same"]) == (7, True)
    assert type(found["other"]) is by_path.names["cfg"].C


@pytest.fixture
def by_hand(notebook: Notebook) -> Iterator[Notebook]:
    notebook.cell(
        "import types, sys\ndm = types.ModuleType('td_dm')\n"
        "exec('Q = 5\\ndef f(x):\\n    return x + Q\\nclass C:\\n    def g(self): return f(1)', dm.__dict__)\n"
        "sys.modules['td_dm'] = dm"
    )
    yield notebook
    del sys.modules["td_dm"]


@pytest.mark.parametrize(
    "source",
    ["a = dm.f(3)\nc = dm.C().g()", "from td_dm import f\nimport td_dm\na = f(3)\nc = td_dm.C().g()"],
)
def test_a_module_made_by_hand_goes_along(by_hand: Notebook, source: str) -> None:
    found = by_hand.run(source)
    assert (found["a"], found["c"]) == (8, 6)
    assert sys.modules["td_dm"] is by_hand.names["dm"]


def test_a_function_of_a_module_made_by_hand(by_hand: Notebook) -> None:
    by_hand.cell("fun = dm.f\ndel dm")
    assert by_hand.run("a = fun(1)")["a"] == 6


def test_what_uses_a_module_made_by_hand(by_hand: Notebook) -> None:
    by_hand.cell("from td_dm import C, f as fun\nthing = C()\ndef late():\n    import td_dm\n    return td_dm.f(0)")
    found = by_hand.run("import td_dm\ntd_dm.Q = 6\na = thing.g(), fun(1), late()\nmade = C()")
    assert found["a"] == (7, 7, 6)
    assert type(found["made"]) is by_hand.names["C"]
    assert by_hand.names["dm"].Q == 6


def test_what_cannot_leave_a_module_made_by_hand_is_named(by_hand: Notebook) -> None:
    by_hand.cell("import threading\ndm.LOCK = threading.Lock()")
    with pytest.raises(CaptureError, match=r"dm\.LOCK: _thread\.lock: cannot pickle"):
        by_hand.capture("print(dm.f(3))")


def test_a_module_registered_under_another_name_than_its_files(notebook: Notebook, tmp_path: Path) -> None:
    write(tmp_path, {"elsewhere/base.py": "def f(x): return x * 2"})
    notebook.cell(
        BY_PATH.format(path=str(tmp_path / "elsewhere" / "base.py")) + "\nimport sys\nsys.modules['td_cfg'] = cfg"
    )
    try:
        assert notebook.run("a = f(1) + cfg.f(1)")["a"] == 4
    finally:
        del sys.modules["td_cfg"]


@pytest.fixture
def edited(notebook: Notebook, project: Path) -> Notebook:
    """A notebook with modules that were imported, and their files edited since."""
    write(project, {"td_old.py": "import td_helper\nW = 3", "td_helper.py": "H = 1", "td_op/__init__.py": "",
                    "td_op/deep.py": "from . import late\nV = 'old'", "td_op/late.py": "V = 1"})  # fmt: skip
    notebook.cell("import td_old, td_op.deep")
    sources.note()
    write(project, {"td_old.py": "W = 55", "td_op/deep.py": "V = 'newer'", "td_op/data.py": "V = 5"})
    return notebook


def test_a_module_goes_as_it_was_imported(edited: Notebook) -> None:
    captured = edited.send("a = td_old.W, td_old.td_helper.H, td_op.deep.V\nfrom td_op.data import V")
    assert edited.bring(captured) == {"a": (3, 1, "old"), "V": 5}
    assert "td_old.py has changed; the ranks use td_old as it was imported here" in " ".join(captured.notes)
    edited.cell("import importlib\nimportlib.reload(td_old)")
    assert edited.run("a = td_old.W")["a"] == 55


def test_a_module_whose_file_is_gone(edited: Notebook, project: Path) -> None:
    (project / "td_old.py").unlink()
    (project / "td_op" / "deep.py").unlink()
    assert edited.run("a = td_old.W, td_op.deep.V")["a"] == (3, "old")


def test_a_reload_that_fails_leaves_the_module_as_it_was(edited: Notebook, project: Path) -> None:
    write(project, {"td_old.py": "W = = 2"})
    edited.cell("import importlib\ntry: importlib.reload(td_old)\nexcept SyntaxError: pass")
    assert edited.run("a = td_old.W")["a"] == 3


def test_what_autoreload_has_brought_up_to_date_in_place_goes_as_it_is(edited: Notebook) -> None:
    sources.note({"td_old": 1.0})
    sources.note({"td_old": 2.0})
    assert edited.run("a = td_old.W")["a"] == 55


def test_an_import_before_anything_was_noted(
    notebook: Notebook, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    write(project, {"td_first.py": "W = 3"})
    notebook.cell("import td_first")
    write(project, {"td_first.py": "W = 44"})
    captured = notebook.send("a = td_first.W")
    assert notebook.bring(captured)["a"] == 44
    assert "td_first.py is newer than the module in this notebook; the ranks use the new file" in captured.notes[0]


def test_no_file_is_read_again_where_nothing_is_new(edited: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.note()
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr(os, "stat", lambda path, **_: pytest.fail(f"{path} was looked at"))
    sources.note()
