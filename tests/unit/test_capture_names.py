"""Which names a cell needs and binds."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_torchdist.capture import analyse
from jupyter_torchdist.protocol.errors import CellSyntaxError


def needs(source: str) -> set[str]:
    import builtins

    return {name for name in analyse(source, "Cell In[1]").needs if not hasattr(builtins, name)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = y", "y"),
        ("y = 1; x = y", ""),
        ("x += 1", "x"),
        ("x[0] += 1", "x"),
        ("a.b.c = d", "a d"),
        ("x: T = v", "T v"),
        ("x: T", "T"),
        ("from __future__ import annotations\nx: T = v", "v"),
        ("if c:\n    x = 1\nx", "c x"),
        ("if c:\n    x = 1\nelse:\n    x = 2\nx", "c"),
        ("if c:\n    x = 1\nelse:\n    raise E\nx", "c E"),
        ("for i in r:\n    x = i\nx", "r x"),
        ("for i in r:\n    use(x)\n    x = i", "r use x"),
        ("for i, (j, *k) in r:\n    i, j, k", "r"),
        ("while c:\n    c = f()\n    x = 1\nx", "c f x"),
        ("try:\n    x = f()\nexcept E as e:\n    e\nx", "f E x e"),
        ("try:\n    x = f()\nexcept E:\n    x = 2\nx", "f E"),
        ("try:\n    x = f()\nexcept E:\n    raise\nx", "f E"),
        ("try:\n    f()\nfinally:\n    x = 1\nx", "f"),
        ("with f() as g, g.h() as (a, b):\n    x = a\nx, b", "f"),
        ("import contextlib\nwith contextlib.suppress(E):\n    x = f()\nx", "E f x"),
        ("class K:\n    b = a\n    c = [b for _ in r]", "a b r"),
        ("class K:\n    try:\n        c = a\n    except E:\n        b = c", "a E c"),
        ("class K:\n    if t:\n        c = 1\n    else:\n        c = 2\n    b = c", "t c"),
        ("class K:\n    if t:\n        c = 1\n    b = [c for _ in r]\n    c = 2\n    d = c", "t c r"),
        ("class K:\n    c = 1\n    if t:\n        del c\n    b = c", "t c"),
        ("def f(a, b=d, *c, k=e, **m) -> R:\n    return a, b, c, k, m, g, L\nf()", "d e R g L"),
        ("def f():\n    return model\nmodel = 1\nf()", ""),
        ("def f():\n    return model\nf()\nmodel = 1", "model"),
        ("def f():\n    return model", ""),
        ("def f():\n    return model\ncallbacks = [f]", "model"),
        ("def f():\n    return g()\ndef g():\n    return y\nf()", "y"),
        ("def f():\n    return g()\ndef g():\n    return y\ny = 1\nf()", ""),
        ("@dec\ndef f():\n    return y", "dec y"),
        ("f = lambda a, b=d: a + b + y", "d y"),
        ("[x for x in xs if x > t]", "xs t"),
        ("{k: v for k, v in p.items() for w in v}", "p"),
        ("sum(x * y for x in xs)", "y xs"),
        ("[y := f(x) for x in xs]\nprint(y)", "f xs y"),
        ("data = [g(x) for x in data]", "g data"),
        ("class C(B, metaclass=M):\n    a = b\n    c = a\n    def f(self): return z, a\nC()", "B M b z a"),
        ("class C:\n    x = x", "x"),
        ("class C:\n    def f(self): return C, __class__, super().f()\nC().f()", ""),
        ("del x\n", "x"),
        ("x = 1\ndel x\nx", "x"),
        ("def f():\n    global n\n    n = n + 1\nf()", "n"),
        ("def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += m\n    return g\nf()", "m"),
        ("import a.b as c, d.e\nfrom f import g as h\nc, d, h", ""),
        ("if (n := f()) and n > m:\n    n", "f m"),
        ("a and (b := c)\nb", "a c b"),
        ("x if c else y", "x c y"),
        (
            (
                "match v:\n    case C(a, k=b) if a > t:\n        a, b\n    case [q, *rest]:\n        q, rest\n"
                "    case {'k': z, **m}:\n        z, m\n    case _:\n        pass\nz"
            ),
            "v C t z",
        ),
        ("match v:\n    case 1:\n        x = 1\n    case _:\n        x = 2\nx", "v"),
        ("async def f():\n    async with s as t:\n        async for i in t:\n            yield i\nawait g(f)", "s g"),
        ("f'{x!r:{w}} {y:>{n}}'", "x w y n"),
        ("a, *b = c\n(d[0], e.f) = a, b", "c d e"),
        ("'a string annotation'\nx: 'Later' = 1", ""),
        ("print(*args, **kw)", "args kw"),
        ("try:\n    pass\nexcept (A, B):\n    pass", "A B"),
        ("assert a, b", "a b"),
        ("for i in r:\n    pass\nelse:\n    x = 1\ni", "r i"),
    ],
)  # fmt: skip
def test_needed_names(source: str, expected: str) -> None:
    assert needs(source) == set(expected.split())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b = 1\nc, (d, *e) = x", "a b c d e"),
        ("import p.q, r.s as t\nfrom u import v, w as z", "p t v z"),
        ("def f(a): b = 1\nclass C: d = 1\nasync def g(): pass", "f C g"),
        ("for i in x: pass\nwith f() as h: pass\nif (n := 1): pass", "i h n"),
        ("def f():\n    global n, m\n    n = m = 1", "f n m"),
        ("try: pass\nexcept E as err: pass", "err"),
        ("[y := 1 for _ in r]", "y"),
        ("x: int = 1\ny: int", "x"),
        ("x.a = 1; x[0] = 2", ""),
        ("match v:\n    case [a, *b]: pass\n    case {**c}: pass", "a b c"),
    ],
)
def test_bound_names(source: str, expected: str) -> None:
    assert set(analyse(source, "Cell In[1]").binds) == set(expected.split())


def test_lines_count_as_the_user_sees_them() -> None:
    found = analyse("a = 1\nb = c\n\ndef f():\n    return d\nf()", "Cell In[1]", first_line=2)
    assert found.needs["c"].line == 3
    assert found.needs["d"].line == 6
    assert found.binds["f"] == 5


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("x = 1\ny = (", 3, "never closed"),
        ("def f(:\n    pass", 2, "invalid syntax"),
        ("x = 1\n  y = 2", 3, "unexpected indent"),
        ("return 5", 2, "outside function"),
        ("for x in y:\n    pass\nbreak", 4, "outside loop"),
        ("x = 1\nnonlocal x", 3, "nonlocal"),
        ("def f(a, a): pass", 2, "duplicate"),
        ("x = 'abc", 2, "unterminated"),
        ("a\0b", 2, "null"),
    ],
)
def test_syntax_errors_point_at_the_line(source: str, line: int, words: str) -> None:
    with pytest.raises(CellSyntaxError) as caught:
        analyse(source, "Cell In[7]", first_line=2)
    assert caught.value.lineno == line
    assert words in str(caught.value)
    assert isinstance(caught.value, SyntaxError)
    assert caught.value.filename == "Cell In[7]"


def test_top_level_await_and_future_flags() -> None:
    found = analyse("from __future__ import annotations, division\nx = await y\nasync with z as w: pass", "Cell In[1]")
    import __future__

    assert set(found.needs) == {"y", "z"}
    assert found.flags == __future__.annotations.compiler_flag | __future__.division.compiler_flag


def test_imports_stars_and_magics() -> None:
    found = analyse(
        "from math import *\nimport a.b\ndef f():\n    from c import d\n    get_ipython().run_line_magic('time', 'x')\n"
        "get_ipython().system('ls')\nget_ipython().run_cell_magic('bash', '', 'ls')\nf()",
        "Cell In[1]",
    )
    assert set(found.stars) == {"math"}
    assert {"a.b", "c"} <= set(found.imports)
    assert found.magics == {"%time": 5, "%%bash": 7}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are new in Python 3.12")
def test_type_parameters() -> None:
    assert needs("type A[T] = list[T] | B\nclass C[U: Bound](D[U]):\n    def f[V](self, v: V, u: U) -> A: ...\nC") <= {
        "B",
        "Bound",
        "D",
        "list",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "certain"),
    [
        ("x", True),
        ("for i in r:\n    x", True),
        ("with r:\n    x", True),
        ("if r:\n    x", False),
        ("while r:\n    x", False),
        ("while True:\n    x", True),
        ("r and x", False),
        ("try:\n    x\nexcept NameError:\n    pass", False),
        ("try:\n    x\nexcept ValueError:\n    pass", True),
        ("def f(): return x\nf()", False),
        ("for i in r:\n    if i: x\n    x = 1", False),
        ("[x for i in r]", True),
        ("f(lambda: x)", False),
    ],
)
def test_only_what_surely_runs_is_certain(source: str, certain: bool) -> None:
    assert analyse(source, "Cell In[1]").needs["x"].certain is certain


# A random cell does the same with the names it is said to need as with all names of the notebook.

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
VALUES = st.one_of(
    NAMES,
    st.integers(0, 3).map(str),
    st.builds("({} + {})".format, NAMES, NAMES),
    st.builds("({} if {} else {})".format, NAMES, NAMES, NAMES),
    st.builds("({} and {})".format, NAMES, NAMES),
    st.builds("({} := {})".format, NAMES, NAMES),
    st.builds("sum([{0} + {1} for {0} in (1, 2)])".format, NAMES, NAMES),
    st.builds("sum([({0} := {1}) + _ for _ in (1, 2)])".format, NAMES, NAMES),
    st.builds("(lambda {0}: {0} + {1})({2})".format, NAMES, NAMES, NAMES),
    st.builds("{}()".format, st.sampled_from(["f", "g"])),
)


def _block(body: list[str]) -> str:
    return "\n".join("    " + line for item in body for line in item.split("\n"))


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    blocks = st.lists(inner, min_size=1, max_size=3).map(_block)
    return st.one_of(
        st.builds("if {}:\n{}".format, VALUES, blocks),
        st.builds("if {}:\n{}\nelse:\n{}".format, VALUES, blocks, blocks),
        st.builds("for {} in range({} % 3):\n{}".format, NAMES, VALUES, blocks),
        st.builds("for {} in (1, 2):\n{}\n    if {}: break\nelse:\n{}".format, NAMES, blocks, VALUES, blocks),
        st.builds("try:\n{}\nexcept Exception as {}:\n{}".format, blocks, NAMES, blocks),
        st.builds(
            "try:\n{}\n    1 / ({} % 2)\nexcept ZeroDivisionError:\n{}\nelse:\n{}".format, blocks, NAMES, blocks, blocks
        ),
        st.builds("try:\n{}\nfinally:\n{}".format, blocks, blocks),
        st.builds("def {}(x={}):\n    return {} + {}".format, st.sampled_from(["f", "g"]), VALUES, NAMES, NAMES),
        st.builds(
            "def {}():\n    global {}\n    {} = {}\n    return 1".format,
            st.sampled_from(["f", "g"]),
            NAMES,
            NAMES,
            NAMES,
        ),
        st.builds("class K:\n{}\n    def m(self): return {}\n{} = K().m()".format, blocks, NAMES, NAMES),
        st.builds("with box() as {}:\n{}".format, NAMES, blocks),
        st.builds("while {} > 2:\n    {} = 0\n{}\n    break".format, NAMES, NAMES, blocks),
    )


SIMPLE = st.one_of(
    st.builds("{} = {}".format, NAMES, VALUES),
    st.builds("{} += {}".format, NAMES, VALUES),
    st.builds("del {}".format, NAMES),
    st.builds("show({})".format, VALUES),
    st.builds("{}, {} = {}, {}".format, NAMES, NAMES, VALUES, VALUES),
)
STATEMENTS: st.SearchStrategy[str] = st.one_of(SIMPLE, _compound(SIMPLE), _compound(st.deferred(lambda: STATEMENTS)))
CELLS = st.lists(STATEMENTS, min_size=1, max_size=6).map("\n".join)


def _outcome(code: Any, names: dict[str, Any]) -> tuple[list[Any], str, dict[str, Any]]:
    seen: list[Any] = []

    @contextlib.contextmanager
    def box() -> Any:
        yield 1

    scope: dict[str, Any] = {**names, "show": lambda value: seen.append(repr(value)), "box": box}
    end = ""
    try:
        exec(code, scope)
    except Exception as error:
        end = f"{type(error).__name__}"
    return seen, end, {name: scope.get(name) for name in "abcde" if isinstance(scope.get(name), int)}


@pytest.mark.timeout(240)
@given(CELLS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_random_cell_needs_no_other_names(source: str) -> None:
    try:
        code = compile(source, "cell", "exec")
    except SyntaxError:
        return
    notebook: dict[str, Any] = dict(zip("abcde", range(1, 6), strict=True))
    notebook["f"] = notebook["g"] = lambda: 7
    found = analyse(source, "cell")
    needed = {name: value for name, value in notebook.items() if name in found.needs}
    everything, chosen = _outcome(code, notebook), _outcome(code, needed)
    assert chosen[:2] == everything[:2]
    for name, value in everything[2].items():
        assert chosen[2].get(name, notebook[name]) == value, name
    for name, need in found.needs.items():
        if need.certain and name in notebook and "for" not in source:  # the body of a `for` counts as certain to run
            without = {key: value for key, value in needed.items() if key != name}
            assert _outcome(code, without)[1], name
