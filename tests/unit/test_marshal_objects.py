"""What a notebook holds, as a rank sees it: Python's own kinds of code and data, tensors of every sort."""

from __future__ import annotations

import pytest

from tests import crossing
from tests.crossing import Notebook

ranks, notebook = crossing.ranks, crossing.notebook


@pytest.mark.parametrize(
    ("make", "use"),
    [
        pytest.param(
            "from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass C:\n    a: int = 1\n"
            "    b: list = field(default_factory=list)\nc = C(5)",
            "assert c == C(5, []) and repr(c) == 'C(a=5, b=[])'\nresult = c",
            id="dataclass",
        ),
        pytest.param(
            "with open('/dev/null', 'w', encoding='ascii') as f: pass\nwith open('/dev/zero', 'rb') as g: pass",
            "assert f.closed and (f.name, f.mode, f.encoding) == ('/dev/null', 'w', 'ascii')\n"
            "assert g.closed and (g.name, g.mode) == ('/dev/zero', 'rb')\nresult = g",
            id="closed files",
        ),
        pytest.param(
            "import contextlib\nopen_now = []\n@contextlib.contextmanager\ndef scope(name):\n"
            "    open_now.append(name)\n    yield\n    open_now.pop()\n@scope('a')\ndef f(): return list(open_now)",
            "assert f() == f() == ['a']\nresult = f",
            id="function decorated by a context manager",
        ),
        pytest.param(
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', default=1)",
            "assert vars(p.parse_args([])) == {'lr': 1}\np.add_argument('--late', default=argparse.SUPPRESS)\n"
            "assert vars(p.parse_args([])) == {'lr': 1}\nresult = p",
            id="argparse",
        ),
        pytest.param(
            "names = {}\nexec('a = 1', names)",
            "assert names['__builtins__'] is vars(__import__('builtins'))\nexec('b = a', names)\nresult = names",
            id="namespace of exec",
        ),
        pytest.param(
            "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\n"
            "    def hot(self): return self is Color.RED\n"
            "red = Color.RED",
            "assert red is Color.RED and red.hot() and list(Color) == [Color.RED, Color.BLUE]\nresult = red",
            id="enum",
        ),
        pytest.param(
            "import enum\nclass P(enum.Flag):\n    R = enum.auto()\n    W = enum.auto()\nboth = P.R | P.W",
            "assert P.R in both\nresult = P.W",
            id="flag",
        ),
        pytest.param(
            "from typing import NamedTuple\nclass Pt(NamedTuple):\n    x: int\n    y: int = 2\np = Pt(1)",
            "assert p.y == 2 and p._replace(x=5) == Pt(5, 2)\nresult = p",
            id="named tuple",
        ),
        pytest.param(
            "from typing import TypedDict, Generic, TypeVar, NewType\nT = TypeVar('T')\nUser = NewType('User', int)\n"
            "class D(TypedDict):\n    a: int\nclass G(Generic[T]):\n"
            "    def __init__(self, v: T): self.v = v\ng = G[int](3)",
            "assert g.v == 3 and D(a=1) == {'a': 1} and User(4) == 4 and G[str]\nresult = g",
            id="typing",
        ),
        pytest.param(
            "import abc\nclass Base(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n"
            "class Impl(Base):\n    def f(self): return super().f() or __class__.__name__\ni = Impl()",
            "assert i.f() == 'Impl' and isinstance(i, Base)\ntry:\n    Base()\nexcept TypeError:\n    result = i",
            id="abstract class",
        ),
        pytest.param(
            "class Forwarding:\n    def __init__(self, inner): self.inner = inner\n"
            "    def __getattr__(self, name): return getattr(self.inner, name)\n"
            "    def __setattr__(self, name, value):\n"
            "        vars(self)[name] = value if name == 'inner' else setattr(self.inner, name, value)\n"
            "f = Forwarding([3])",
            "assert f.index(3) == 0\nf.append(4)\nassert f.inner == [3, 4]\nresult = f",
            id="attributes of another object",
        ),
        pytest.param(
            "import json.encoder\n"
            "encode = json.encoder._make_iterencode({}, None, json.encoder.encode_basestring, None, float.__repr__,\n"
            "                                       ': ', ', ', False, False, False)",
            "assert encode.__globals__ is vars(json.encoder)\nassert ''.join(encode([1, 'a'], 0)) == '[1, \"a\"]'\n"
            "result = encode",
            id="function within a library's function",
        ),
        pytest.param(
            "class P:\n    def __init__(self): self.x = 1\n"
            "    def __setstate__(self, state):\n        self.__dict__ = state\n        self.ran = True\np = P()",
            "assert p.ran and p.x == 1\nresult = p",
            id="a __setstate__ that sets __dict__",
        ),
        pytest.param(
            "class S:\n    __slots__ = ('a', 'b')\n    def __init__(self): self.a = [1]\ns = S()",
            "s.a.append(2)\ns.b = 3\nresult = s\nassert not hasattr(s, '__dict__')",
            id="slots",
        ),
        pytest.param(
            "class Meta(type):\n    def __new__(m, n, b, d, **k):\n        c = super().__new__(m, n, b, d)\n"
            "        c.made = True\n        return c\nclass M(metaclass=Meta): pass\nm = M()",
            "assert M.made and type(M) is Meta\nresult = m",
            id="metaclass",
        ),
        pytest.param(
            "class P:\n    count = 0\n    @property\n    def v(self): return self._v * factor\n    @v.setter\n"
            "    def v(self, x): self._v = x\n    @classmethod\n    def c(cls): return cls.__name__\n"
            "    @staticmethod\n    def s(x): return x + factor\nfactor = 2\np = P()\np.v = 4",
            "assert p.v == 8 and P.c() == 'P' and P.s(1) == 3\nresult = p",
            id="properties",
        ),
        pytest.param(
            "import functools\ndef logged(f):\n    @functools.wraps(f)\n    def inner(*a, **k):\n"
            "        calls.append(f.__name__)\n"
            "        return f(*a, **k)\n    return inner\ncalls = []\n@logged\n"
            "def area(w, h=3, *, scale=unit if 'unit' in dir() else 2):\n"
            "    'doc'\n    return w * h * scale",
            (
                "assert area(2) == 12 and area.__doc__ == 'doc' and area.__wrapped__(1) == 6 and calls == ['area']\n"
                "result = area(1)"
            ),
            id="decorator",
        ),
        pytest.param(
            "import functools\n@functools.lru_cache(maxsize=None)\n"
            "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
            "assert fib(5)",
            "result = fib(30)\nassert result == 832040",
            id="lru_cache",
        ),
        pytest.param(
            "import functools\n@functools.singledispatch\ndef show(x): return 'any'\n@show.register\n"
            "def _(x: int): return 'int'\n",
            "result = show(1) + show('')\nassert result == 'intany'",
            id="singledispatch",
        ),
        pytest.param(
            "import functools\ndef power(b, e): return b ** e\nsquare = functools.partial(power, e=2)\n"
            "class K:\n    def __init__(self, n): self.n = n\n"
            "    def add(self, x): return self.n + x\nbound = K(5).add",
            "result = square(4) + bound(1)\nassert result == 22",
            id="partial and bound method",
        ),
        pytest.param(
            "def make():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n"
            "    def get(): return n\n    return inc, get\n"
            "inc, get = make()\ninc()",
            "inc()\nresult = get()\nassert result == 2",
            id="closures that share a variable",
        ),
        pytest.param(
            "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)\n"
            "def fact(n): return 1 if n < 2 else n * fact(n - 1)\ndef local():\n"
            "    def down(n): return n and down(n - 1)\n"
            "    return down\ndown = local()",
            "result = (even(10), fact(5), down(3))\nassert result == (True, 120, 0)",
            id="recursion",
        ),
        pytest.param(
            "import os.path as osp, collections.abc\nimport xml.etree.ElementTree\n"
            "def path(x): return osp.join(x, 'y')\ndef tree(): return xml.etree.ElementTree.fromstring('<a/>').tag",
            "result = path('x') + tree() + str(isinstance([], collections.abc.Sequence))\nassert result == 'x/yaTrue'",
            id="submodules",
        ),
        pytest.param(
            "import torch\nclass Hooked(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.l = torch.nn.Linear(2, 2)\n        self.seen = []\n"
            "        self.l.register_forward_hook(lambda m, i, o: self.seen.append(o.shape))\n"
            "    def forward(self, x): return self.l(x)\nmodel = Hooked()",
            "model(torch.ones(3, 2))\nassert model.seen == [(3, 2)]\nresult = model",
            id="module with hooks",
        ),
        pytest.param(
            "import torch\nlayer = torch.nn.Linear(2, 1)\nseen = []\n"
            "handle = layer.weight.register_hook(lambda g: g * 10)\n"
            "layer.bias.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad)))",
            "layer(torch.ones(1, 2)).sum().backward()\nassert layer.weight.grad.tolist() == [[10, 10]]\n"
            "assert seen == [1.0]\nhandle.remove()\nassert not layer.weight._backward_hooks\nresult = seen",
            id="parameters with hooks",
        ),
        pytest.param(
            "class Outer:\n    class Inner:\n        def f(self): return Outer.tag\n    tag = 7\ni = Outer.Inner()",
            "result = i.f()\nassert result == 7 and Outer.Inner.__qualname__ == 'Outer.Inner'",
            id="nested class",
        ),
        pytest.param(
            "class Reg:\n    known = {}\n    def __init_subclass__(cls, *, tag, **k):\n"
            "        super().__init_subclass__(**k)\n"
            "        Reg.known[tag] = cls\nclass A(Reg, tag='a'): pass\n",
            "result = sorted(Reg.known)\nassert result == ['a'] and Reg.known['a'] is A",
            id="init_subclass with arguments",
        ),
        pytest.param(
            (
                "class Strict:\n    def __init_subclass__(cls, *, tag): cls.tag = tag\n"
                "class B(Strict, tag='b'): pass\nb = B()"
            ),
            "result = b.tag\nassert result == 'b' and B.__bases__ == (Strict,)",
            id="init_subclass that wants an argument",
        ),
        pytest.param(
            "from dataclasses import dataclass\n@dataclass(slots=True, frozen=True)\nclass V:\n    x: int\nv = V(3)",
            "result = v.x\nassert not hasattr(v, '__dict__') and V(3) == v",
            id="dataclass with slots",
        ),
        pytest.param(
            "import numpy as np\nclass Packed:\n    def __init__(self, v): self.v = np.asarray(v)\n"
            "    def __getstate__(self): return {'v': self.v.tolist()}\n"
            "    def __setstate__(self, s): self.v = np.asarray(convert(s['v']))\n"
            "def convert(v): return list(v)\np = Packed([1, 2])",
            "p.v = p.v + 1\nresult = p.v.sum()",
            id="setstate that needs globals",
        ),
        pytest.param(
            "import logging, pathlib, datetime, decimal, uuid, re, random, collections\n"
            "things = [logging.getLogger('x'), pathlib.Path('a/b'), datetime.datetime(2020, "
            "1, 1), decimal.Decimal('1.5'),\n"
            "          uuid.UUID(int=5), re.compile('a+'), random.Random(3), collections.ChainMap({1: 2}), range(3),\n"
            "          slice(1, 2), complex(1, 2), frozenset([1]), ..., NotImplemented, int, len, 'x'.join]",
            "assert len(things) == 17 and things[5].match('aa') and things[15]('abc') == 3\nresult = things[1]",
            id="standard library",
        ),
        pytest.param(
            "import weakref\nclass N: pass\nn = N()\nr = weakref.ref(n)\nw = weakref.WeakValueDictionary(n=n)\n"
            "k = weakref.WeakKeyDictionary({n: 1})",
            "assert r() is n and w['n'] is n and k[n] == 1\nresult = n",
            id="weak references",
        ),
        pytest.param(
            "a = [1]\na.append(a)\nd = {'self': None, 'a': a}\nd['self'] = d\nclass Node: pass\nx, y = Node(), Node()\n"
            "x.peer, y.peer = y, x",
            "assert a[1] is a and d['self'] is d and d['a'] is a and x.peer.peer is x\nx.mark = 1\nresult = y",
            id="cycles",
        ),
        pytest.param(
            "ns = {}\nexec('k = 3\\ndef f(x): return x + k', ns)\nf = ns['f']",
            "result = f(1)\nassert result == 4",
            id="function of an exec'd namespace",
        ),
        pytest.param(
            "import asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x + bias\nbias = 2\n"
            "def gen(n):\n    yield from range(n)",
            "result = asyncio.run(later(1)) + sum(gen(3))\nassert result == 6",
            id="coroutine and generator functions",
        ),
        pytest.param(
            "sum = 7\nimport builtins",
            "result = sum + builtins.len('ab')\nassert result == 9",
            id="shadowed builtin",
        ),
    ],
)
def test_code_and_data_of_the_notebook_work_on_a_rank(notebook: Notebook, make: str, use: str) -> None:
    notebook.cell(make)
    before = dict(notebook.names)
    notebook.run(use)
    assert "frames" not in notebook.answer, notebook.error()
    assert "result" in notebook.names
    # Nothing of the notebook was replaced by a copy.
    for name in before.keys() - {"__builtins__"}:
        assert notebook.names[name] is before[name], name


@pytest.mark.parametrize(
    "make",
    [
        "torch.tensor(3.5)",
        "torch.tensor(True)",
        "torch.empty(0, 3)",
        "torch.randn(3, 4).t()",
        "torch.randn(4, 4)[::2, 1:]",
        "torch.randn(600, 600)[::2, 1:]",
        "torch.randn(3, 1).expand(3, 5)",
        "torch.randn(3, dtype=torch.bfloat16)",
        "torch.randn(3, dtype=torch.complex64)",
        "torch.randn(3, dtype=torch.complex64).conj()",
        "torch.arange(5, dtype=torch.int16)",
        "torch.randn(3).to(torch.float8_e4m3fn)",
        "torch.randn(3, requires_grad=True)",
        "torch.randn(3, requires_grad=True) * 2",
        "torch.randn(4, 4).to_sparse()",
        "torch.randn(4, 4).to_sparse_csr()",
        "torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)",
        "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])",
        "torch.empty(3, device='meta')",
        "torch.nn.Parameter(torch.randn(3), requires_grad=False)",
        "torch.nn.Buffer(torch.randn(3))",
        "torch.nn.UninitializedParameter()",
        "torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)",
        "torch.ones(3).as_subclass(Sub)",
    ],
)
def test_every_sort_of_tensor_crosses_twice(notebook: Notebook, make: str) -> None:
    notebook.cell(f"import torch\nclass Sub(torch.Tensor): pass\nt = {make}\nholder = [t]")
    notebook.run("back = [t, t.detach().clone() if type(t).__name__ != 'UninitializedParameter' else t]")
    assert notebook.answer["changed"] == []
    original, (same, copy) = notebook.names["t"], notebook.names["back"]
    assert same is original
    assert type(copy) is type(original) or type(original).__name__ in ("Parameter", "Buffer")
    assert (copy.dtype, copy.device, copy.layout) == (original.dtype, original.device, original.layout)
    if original.layout == copy.layout and not getattr(original, "is_nested", False) and "Uninit" not in make:
        assert copy.shape == original.shape
        if original.device.type == "cpu" and "float8" not in make and not original.is_quantized:
            assert bool((copy.to_dense() == original.detach().to_dense()).all())


def test_a_gradient_that_would_go_on_into_the_notebook_is_told(notebook: Notebook) -> None:
    notebook.cell("import torch\nw = torch.ones(2, requires_grad=True)\nfeatures = w * 2\nkept = [features]")
    (note,) = notebook.capture("features.sum().backward()").notes
    assert note.startswith("backward() ends at features, computed in an earlier cell")
    notebook.cell("def step():\n    features.sum().backward()")
    assert notebook.capture("step()").notes == (note,)
    assert not notebook.capture("print(features)").notes
    assert not notebook.capture("(w * 3 + len(kept)).sum().backward()").notes


def test_gradients_and_attributes_of_tensors_cross(notebook: Notebook) -> None:
    notebook.cell("import torch\nw = torch.nn.Parameter(torch.ones(3))\n(w * 2).sum().backward()\nw.note = 'mine'")
    notebook.run("assert w.grad.tolist() == [2, 2, 2] and w.note == 'mine'\n(w * 3).sum().backward()\nw.note = 'ours'")
    assert notebook.names["w"].grad.tolist() == [5, 5, 5]
    assert notebook.names["w"].note == "ours"


@pytest.mark.parametrize(
    "make",
    [
        "np.array(3)",
        "np.zeros((0, 2))",
        "np.arange(12).reshape(3, 4).T",
        "np.arange(400_000.).reshape(-1, 4)[:, ::2]",
        "np.array(['a', None, [1]], dtype=object)",
        "np.array([(1, 2.0)], dtype=[('a', 'i4'), ('b', 'f8')])",
        "np.ma.array([1, 2], mask=[0, 1])",
        "np.array(['2020-01-01'], dtype='datetime64[D]')",
        "np.arange(100_000).astype('>i4')",
        "np.random.default_rng(3)",
        "pd.DataFrame({'a': range(50_000), 'b': 'text', 'c': 1.5})",
        "pd.Series([1, None], index=pd.date_range('2020', periods=2))",
        "pd.Categorical(['a', 'b'])",
    ],
)
def test_arrays_and_frames_cross_twice(notebook: Notebook, make: str) -> None:
    notebook.cell(f"import numpy as np, pandas as pd, copy\nv = {make}\nholder = [v]")
    notebook.run("twin = copy.deepcopy(v)\nback = [v]")
    assert notebook.answer["changed"] == []
    names = notebook.names
    assert names["back"][0] is names["v"]
    assert repr(names["twin"]).split(" at 0x")[0] == repr(names["v"]).split(" at 0x")[0]
    assert type(names["twin"]) is type(names["v"])


def test_a_memory_mapped_array_goes_as_its_file(notebook: Notebook) -> None:
    path = notebook.home.parent / "data.bin"
    notebook.cell(
        f"import numpy as np\nnp.arange(1_000_000, dtype='i4').tofile({str(path)!r})\n"
        f"data = np.memmap({str(path)!r}, dtype='i4', mode='r')\npart = data[10:20]"
    )
    captured = notebook.send("result = (int(data[5]), part.tolist(), type(part).__name__)")
    assert captured.size < 10_000
    assert notebook.bring(captured)["result"] == (5, list(range(10, 20)), "memmap")


def test_a_rank_may_write_into_what_it_was_given_and_the_blob_stays(notebook: Notebook) -> None:
    notebook.cell("import numpy as np, torch\na = np.zeros(100_000)\nt = torch.zeros(100_000)")
    captured = notebook.send("a[:] = 1\nt.fill_(2)\nt.resize_(50_000)\ntotal = a.sum()")
    assert notebook.manifest
    for blob in notebook.manifest.buffers:
        notebook.store.verify(blob)
    found = notebook.bring(captured)
    assert found["total"] == 100_000
    assert notebook.names["t"].shape == (50_000,)


def test_a_call_is_captured_with_its_function(notebook: Notebook) -> None:
    from jupyter_torchdist import capture

    notebook.cell(
        "rate = 3\nlog = []\ndef train(x, *, y=1):\n    log.append(x)\n"
        "    return helper(x) + y\ndef helper(x): return x * rate"
    )
    captured = capture.capture_call(notebook.names["train"], (5,), {"y": 2}, cwd=notebook.home)
    assert set(captured.names) >= {"__torchdist_call__", "helper", "rate", "log"}
    notebook.launch(captured)
    assert notebook.bring(captured)["value"] == 17
    assert notebook.names["log"] == [5]
