"""Cases that hypothesis makes: class hierarchies, closures and containers, and cells that change them."""

from __future__ import annotations

from hypothesis import strategies as some

from tests.differential.harness import Case

_NAMES = some.sampled_from(["a", "b", "c"])
_VALUES = some.sampled_from(
    ["1", "'t'", "[1]", "{'k': 2}", "None", "(1, [2])", "{3}", "shared", "first", "Base", "helper"]
)
_KINDS = ["Base", "Mixin", "Left", "Right", "Both"]

_SETUP = """
shared = []
def helper(x, into=[]):
    into.append(x)
    helper.calls += 1
    return len(into)
helper.calls = 0
def counter():
    n, log = 0, []
    def up():
        nonlocal n
        n += 1
        log.append(n)
        return n
    return up, lambda: (n, log)
up, told = counter()
"""


@some.composite
def _hierarchy(draw: some.DrawFn) -> str:
    meta = draw(some.sampled_from(["", "metaclass=Meta", "metaclass=abc.ABCMeta"]))
    body = draw(some.lists(some.tuples(_NAMES, some.sampled_from(["1", "[]", "{}", "'t'", "shared"])), max_size=3))
    slots = draw(some.sampled_from(["", "    __slots__ = ('a_slot',)\n"])) if not body else ""
    lines = [f"class Base({meta}):\n{slots}    made = 0\n    def __init__(self): type(self).made += 1\n"]
    lines += [f"    {name} = {value}\n" for name, value in body]
    lines.append("    def run(self): return sorted(k for k in vars(type(self)) if not k.startswith('_'))\n")
    override = draw(
        some.sampled_from(["    a = 'left'\n", "    def run(self): return super().run() + ['left']\n", "    pass\n"])
    )
    lines += [
        f"class Left(Base):\n{override}",
        "class Right(Base):\n    a = 'right'\n",
        "class Both(Left, Right): pass\n",
    ]
    return "".join(lines)


_STATEMENTS = some.one_of(
    some.builds("{}.{} = {}".format, some.sampled_from(["Base", "Left", "Both", "first", "helper"]), _NAMES, _VALUES),
    some.builds("shared.append({})".format, _VALUES),
    some.builds("del {}.{}".format, some.sampled_from(["Base", "Left"]), _NAMES),
    some.builds("fresh_{} = {}()".format, _NAMES, some.sampled_from(["Base", "Left", "Both"])),
    some.builds("{} = {}".format, some.sampled_from(["x", "y", "shared"]), _VALUES),
    some.sampled_from([
        "up()", "r = told()", "helper(1)", "r = helper(2)", "r = first.run()", "del shared", "made.append(Both)",
        "Registry['n'] = Left", "globals()['z'] = 4", "class Late(Left): a = []", "up, told = counter()",
        "first.__class__ = Left", "helper.__defaults__ = ([7],)", "Base.late = lambda self: shared",
    ]),
)  # fmt: skip


@some.composite
def a_case(draw: some.DrawFn) -> Case:
    """Names that are made, two cells on ranks that change them, and one that looks."""
    meta = (
        "import abc\nmade, Registry = [], {}\nclass Meta(type):\n    def __init__(cls, *a):\n        made.append(cls)\n"
    )
    setup = (
        f"{meta}{_SETUP}{draw(_hierarchy())}first = {draw(some.sampled_from(['Base', 'Left', 'Both']))}()\nx = y = 0"
    )
    cells: list[tuple[str, str | None]] = [(setup, None)]
    for _ in range(draw(some.integers(1, 2))):
        lines = draw(some.lists(_STATEMENTS, min_size=1, max_size=6))
        cells.append(
            ("\n".join(f"try:\n    {line}\nexcept Exception as e:\n    print(type(e).__name__)" for line in lines), "")
        )
    cells.append(("print(first.run(), told(), helper(0), [k.made for k in (Base, Left, Right, Both)])", None))
    return Case("generated", tuple(cells))
