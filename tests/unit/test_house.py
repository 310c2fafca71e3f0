"""Promises of the project as a whole: one version, clean imports, layers, files that say what is so."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jupyter_torchdist
from jupyter_torchdist.protocol.spec import OPTIONS
from scripts import docs_pages

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jupyter_torchdist"
MODULES = sorted(PACKAGE.rglob("*.py"))

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked() -> list[Path]:
    """Files of the repository, or of the tree where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]


def fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_one_version() -> None:
    assert importlib.metadata.version("jupyter_torchdist") == jupyter_torchdist.__version__
    assert f"## {jupyter_torchdist.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_import_is_light() -> None:
    """In a kernel no torch for our sake, in a rank no IPython."""
    heavy = ("torch", "numpy", "IPython", "ipykernel", "cloudpickle")
    code = f"import sys, jupyter_torchdist; print([name for name in {heavy} if name in sys.modules])"
    assert fresh_python(code).strip() == "[]"


def test_public_names_exist() -> None:
    for name in jupyter_torchdist.__all__:
        assert getattr(jupyter_torchdist, name) is not None or name in ("last", "mesh")


def test_no_room_takes_the_place_of_a_public_name() -> None:
    """Where a module is imported, its package gets its name as an attribute."""
    rooms = {path.stem for path in Path(jupyter_torchdist.__file__).parent.iterdir()}
    assert rooms & set(jupyter_torchdist.__all__) == set()


def test_launcher_is_registered() -> None:
    (local,) = importlib.metadata.entry_points(group="jupyter_torchdist.launchers", name="local")
    assert local.load().__name__ == "LocalLauncher"


def test_command_is_installed() -> None:
    done = subprocess.run([Path(sys.executable).with_name("torchdist"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "jobs" in done.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_readable(path: Path) -> None:
    """A docstring, and annotations that cost nothing at import."""
    text = path.read_text()
    tree = ast.parse(text)
    if not tree.body:
        return
    assert ast.get_docstring(tree), "no docstring"
    if any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(tree)):
        assert "from __future__ import annotations" in text


def test_layers() -> None:
    """Who may import whom; the contracts stand in pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_room_is_in_a_layer() -> None:
    contracts = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
    named = {name.strip() for layer in contracts["layers"]["layers"] for name in layer.split("|")}
    rooms = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - {"__init__"} == named


def test_python_3_10_can_read_every_file() -> None:
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_torch_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    names = [re.split(r"[=;]", line)[0].strip() for line in pins if line and not line.startswith("#")]
    assert names[0] == "torch"
    kinds = [re.sub(r"==[^;]*", "", line) for line in pins if line and not line.startswith("#")]
    assert len(kinds) == len(set(kinds)), "one release for each Python"
    extras = PROJECT["project"]["optional-dependencies"].values()
    needed = [*PROJECT["project"]["dependencies"], *(requirement for extra in extras for requirement in extra)]
    for requirement in needed:
        assert normal(re.split(r"[<>=!~ ;\[]", requirement)[0]) in map(normal, names)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_notebooks_are_committed_without_outputs() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), path
            assert cell.get("execution_count") is None, path


def test_generated_pages_are_current() -> None:
    """They name every option and every refusal."""
    assert [str(page) for page, text in docs_pages.pages().items() if page.read_text(encoding="utf-8") != text] == []
    assert [option.flag for option in OPTIONS if option.flag not in (ROOT / "docs" / "cell.md").read_text()] == []


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "labextension" / "README.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"[\w./-]+(?:\.py|\.ts|/)(?![\w*])", (ROOT / "ARCHITECTURE.md").read_text())
    places = (ROOT, PACKAGE, PACKAGE / "strategies")
    files_of_a_job = {"requests/", "streams/"}
    gone = {name for name in named if not any((place / name.lstrip("/")).exists() for place in places)}
    assert gone - files_of_a_job == set()


def test_no_address_of_one_machine() -> None:
    """No registry's address and no path of the machine it was written on in any file."""
    forbidden = re.compile("|".join(["--(extra-)?index" + "-url", "--regis" + "try", re.escape(str(ROOT)) + r"\b"]))
    for path in tracked():
        if path.suffix in (".png", ".ico"):
            continue
        assert not forbidden.search(path.read_text(errors="replace")), path
