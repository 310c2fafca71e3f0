"""Between releases of Python: what a notebook of one sends to a rank of another, and what comes back."""

from __future__ import annotations

import linecache
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from jupyter_torchdist.capture import packages
from jupyter_torchdist.marshal import portable
from jupyter_torchdist.protocol.errors import CaptureError
from tests.crossing import Notebook, Ranks
from tests.lacking import lacking

RELEASES = ("3.10", "3.11", "3.12", "3.13")
HERE = portable.minor(platform.python_version())


def interpreter(release: str) -> Path:
    """Another Python: that of pyenv, or on ``PATH``."""
    found = sorted(Path.home().glob(f".pyenv/versions/{release}.*/bin/python{release}"))
    path = str(found[-1]) if found else shutil.which(f"python{release}")
    if path is None:
        lacking(f"no Python {release} here: pyenv install {release}")
    return Path(path)


@pytest.fixture(scope="module", params=[release for release in RELEASES if release != HERE])
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    packages = tmp_path_factory.mktemp("packages")
    (packages / "cloudpickle").symlink_to(Path(cloudpickle.__file__).parent)
    started = Ranks(interpreter(request.param), packages)
    yield started
    started.close()


@pytest.fixture
def notebook(home: Path, others: Ranks) -> Notebook:
    return Notebook(home, others)


def run(notebook: Notebook, source: str) -> dict[str, Any]:
    return notebook.run(source, portable=True)


FUNCTIONS = '''
import functools, math, pathlib
scale = 10

def plain(x, y=2, *rest, z: int = 3, **more):
    """Doc."""
    return x * y + z + scale + sum(rest)

def outer(a):
    b = a + 1
    def inner(c, d=b):
        nonlocal b
        b += 1
        return a + b + c + d, [a * i for i in range(2)]
    return inner

closed = outer(5)
pair = [lambda x: x + 1, lambda x: x - 1, lambda x: x - 1]
many = [(lambda y: lambda: (y, k))(k) for k in range(3)]
gen = lambda n: (i * scale for i in range(n))

@functools.lru_cache(maxsize=4)
def cached(n):
    return n if n < 2 else cached(n - 1) + cached(n - 2)

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return "wrapped", function(*args)
    return wrapper

@decorated
@decorated
def twice(x):
    text = """a
    b"""
    return x, text

async def later():
    return [x async for x in source()]

async def source():
    for i in range(2):
        yield i

def calls(x):
    return math.floor(x), pathlib.Path("c").name, [math.ceil(y) for y in (x,)]

def failing(x):
    # a comment
    if x:
        return 1 / 0

if True:
	def tabbed():
		return "tab"
path = pathlib.Path("a") / "b"
'''


def test_functions_of_cells_run(notebook: Notebook) -> None:
    notebook.cell(FUNCTIONS)
    found = run(
        notebook,
        "import asyncio, sys\n"
        "got = [plain(1), plain(1, 2, 3, z=4), closed(1), closed(1), [f(1) for f in pair], [f() for f in many],\n"
        "       list(gen(3)), cached(20), twice(1), asyncio.run(later()), tabbed(), str(path), calls(1.5)]\n"
        "release = sys.version_info[:2]\n"
        "first = twice.__wrapped__.__wrapped__.__code__.co_firstlineno, plain.__code__.co_firstlineno\n",
    )
    lines = FUNCTIONS.splitlines()
    assert found["first"] == (
        lines.index("@decorated") + 1,
        lines.index("def plain(x, y=2, *rest, z: int = 3, **more):") + 1,
    )
    assert found["release"] != sys.version_info[:2]
    assert found["got"] == [
        15, 19, (19, [0, 5]), (20, [0, 5]), [2, 0, 0], [(0, 2), (1, 2), (2, 2)],
        [0, 10, 20], 6765, ("wrapped", ("wrapped", (1, "a\n    b"))), [0, 1], "tab", "a/b", (1, "c", [2]),
    ]  # fmt: skip


CLASSES = """
import abc, collections, dataclasses, enum, typing

class Base(abc.ABC):
    __slots__ = ("x",)
    def __init__(self, x):
        self.x = x
    @abc.abstractmethod
    def value(self): ...

class Child(Base):
    count = 0
    __secret = 7
    def __init__(self, x, y):
        super().__init__(x)
        self.__y = y
        type(self).count += 1
    def value(self):
        return self.x, self.__y, self.__secret, __class__.__name__
    @property
    def both(self): return self.x + self.__y
    @classmethod
    def make(cls): return cls(1, 2)
    @staticmethod
    def fixed(a=[1]): return a
    class Inner:
        def name(self): return type(self).__qualname__

@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)
    k: dataclasses.InitVar[int] = 1
    c: typing.ClassVar[int] = 5
    def __post_init__(self, k): self.k2 = k
    def size(self): return self.x + len(self.y)

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    a: int
    b: int = 2

@dataclasses.dataclass
class Longer(Point):
    z: int = 3
    def __repr__(self): return f"Longer({self.z})"

class Colour(enum.Enum):
    RED = 1
    BLUE = 2
    def shout(self): return self.name + "!"

class Access(enum.IntFlag):
    READ = 1
    WRITE = 2

Pair = collections.namedtuple("Pair", "left right", defaults=[9])

class Triple(typing.NamedTuple):
    a: int
    b: int = 4
    def total(self): return self.a + self.b

point, frozen, longer, child = Point(1, [2], 3), Frozen(a=1), Longer(1, z=8), Child(3, 4)
pair, triple, colour, access = Pair(1), Triple(2), Colour.BLUE, Access.READ | Access.WRITE
"""


def test_classes_of_cells_run(notebook: Notebook) -> None:
    notebook.cell(CLASSES)
    found = run(
        notebook,
        "got = [child.value(), child.both, Child.make().both, Child.fixed(), Child.Inner().name(), Child.count,\n"
        "  repr(point), point.size(), Point(5) > point, Point(1) == Point(1), Point(1).y is Point(1).y, point.k2,\n"
        "  Point.__hash__ is None, [f.name for f in dataclasses.fields(Longer)], repr(longer), longer.z, Longer(1).z,\n"
        "  frozen, hash(frozen) == hash(Frozen(a=1)), hasattr(frozen, '__dict__'),\n"
        "  dataclasses.replace(frozen, b=7).b,\n"
        "  colour.shout(), Colour(1) is Colour.RED, colour is Colour.BLUE, access == Access(3), list(Colour),\n"
        "  pair, pair._replace(left=4), Pair(5).right, triple.total(), Triple(1)._asdict(), triple]\n"
        "try:\n    frozen.a = 2\nexcept dataclasses.FrozenInstanceError: got.append('frozen')\n"
        "try:\n    Base(1)\nexcept TypeError: got.append('abstract')\n"
        "@dataclasses.dataclass\nclass Below(Point):\n    w: int = 1\n"
        "got.append(Below(1).y)\n",
    )
    names = notebook.names
    assert found["got"] == [
        (3, 4, 7, "Child"), 7, 3, [1], "Child.Inner", 2,
        "Point(x=1, y=[2])", 2, True, True, False, 3,
        True, ["x", "y", "z"], "Longer(8)", 8, 3,
        names["frozen"], True, False, 7,
        "BLUE!", True, True, True, [names["Colour"].RED, names["Colour"].BLUE],
        names["pair"], (4, 9), 9, 6, {"a": 1, "b": 4}, names["triple"], "frozen", "abstract", [],
    ]  # fmt: skip
    assert [type(value) for value in found["got"][-5:-3]] == [dict, names["Triple"]]


def test_what_the_cell_makes_comes_back(notebook: Notebook) -> None:
    notebook.cell("import dataclasses\nlog = []\nclass Known:\n    def f(self): return 1\n")
    found = run(
        notebook,
        "def made(x, *, by=2):\n    return x * by + offset\noffset = 1\n"
        "class New(Known):\n    def f(self): return super().f() + 1\n"
        "@dataclasses.dataclass\nclass Made:\n    a: int\n    b: int = 2\n"
        "new, value, curried, log[:] = New(), Made(1), (lambda n: lambda m: n + m)(3), [New, made]\n",
    )
    assert found["made"](2) == 5
    assert (found["new"].f(), found["curried"](4), found["value"], found["Made"](1)) == (
        2,
        7,
        found["Made"](1),
        found["value"],
    )
    assert notebook.names["log"][1] is found["made"]
    # And it may travel again, although its file is not known here.
    again = run(notebook, "both = made(2), new.f(), curried(1), Made(7).a, value.b")
    assert again["both"] == (5, 2, 4, 7, 2)


def test_an_exception_has_the_lines_of_both(notebook: Notebook) -> None:
    notebook.cell(FUNCTIONS)
    notebook.send(
        "class Own(Exception): pass\ntry:\n    failing(1)\nexcept ZeroDivisionError as e:\n    raise Own(3) from e",
        portable=True,
    )
    error = notebook.error()
    assert (type(error).__name__, error.args) == ("Own", (3,))
    assert isinstance(error.__cause__, ZeroDivisionError)
    notebook.send("failing(1)", portable=True)
    lines = FUNCTIONS.splitlines()
    number = lines.index("        return 1 / 0") + 1
    assert notebook.answer["frames"][-1] == ["Cell In[1]", number, "failing", "return 1 / 0"]


def test_a_function_without_source_is_refused_by_name(notebook: Notebook) -> None:
    exec("def ghost(): return 1", notebook.names)
    notebook.cell("def user(): return ghost()")
    with pytest.raises(
        CaptureError, match=r"(?s)ghost cannot leave the notebook.*the source of ghost \(<string>, line 1\)"
    ):
        notebook.capture("user()", portable=True)


def test_a_function_whose_file_has_changed_is_refused(notebook: Notebook) -> None:
    notebook.cell("def edited(): return 1")
    file = notebook.names["edited"].__code__.co_filename
    linecache.cache[file] = (9, None, ["def edited(): return 2"], file)
    with pytest.raises(CaptureError, match="the source of edited"):
        notebook.capture("edited()", portable=True)


def test_bytecode_of_another_release_is_refused_before_it_is_read(notebook: Notebook) -> None:
    notebook.cell("def f(): return 1")
    captured = notebook.capture("f()")
    with pytest.raises(AssertionError, match=f"captured by Python {HERE}"):
        notebook.launch(captured, "f()")


def test_an_object_of_a_library_that_fails_there_is_named(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    (site / "td_lib-1.5.dist-info").mkdir(parents=True)
    (site / "td_lib-1.5.dist-info" / "METADATA").write_text("Name: td-lib\nVersion: 1.5\n")
    (site / "td_lib.py").write_text("class Thing: pass\n")
    monkeypatch.syspath_prepend(str(site))
    notebook.cell("import td_lib\nthing = [td_lib.Thing()]")
    captured = notebook.capture("thing", portable=True)
    captured.packages = packages(captured)
    with pytest.raises(AssertionError) as caught:
        notebook.launch(captured, "thing")
    assert "thing could not be rebuilt on the rank: ModuleNotFoundError: No module named 'td_lib'" in str(caught.value)
    assert "td-lib is missing here, and 1.5 in the notebook" in str(caught.value)
    sys.modules.pop("td_lib")
