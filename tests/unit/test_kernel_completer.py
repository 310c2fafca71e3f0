"""Tab and Shift-Tab after the two magics."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_torchdist.kernel import completer, inspector
from jupyter_torchdist.protocol.columns import NARROW
from jupyter_torchdist.protocol.spec import BY_FLAG, OPTIONS
from jupyter_torchdist.verbs import parse


def tab(line: str, *names: str) -> list[str]:
    """What Tab at the end of ``line`` offers, cut into words as IPython does."""
    symbol = line
    for delimiter in " \t=,@":
        symbol = symbol.rpartition(delimiter)[2]
    offered = completer.complete(line, symbol, lambda: names)
    assert offered is not None
    return offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%%distribute --ra", ["--ranks"]),
        ("%%distribute --watch c", ["compact"]),
        ("%%distribute --watch=c", ["compact"]),
        ("%%distribute --collect ", ["rank0", "all"]),
        ("%%distribute --ranks 2 --backend g", ["gloo"]),
        ("%%distribute --exclude bi", ["big"]),
        ("%%distribute --out model,bi", ["big"]),
        ("%%distribute --out a", ["auto"]),
        ("%%distribute --ranks 2 --g", ["--gpu-type", "--grad-accumulation", "--grace"]),
        ("%%distribute --gpus 2 --ra", []),
        ("%%distribute --fresh --fr", []),
        ("%%distribute --exclude a --excl", ["--exclude"]),
        ("%%distribute --timeout 1", ["10m", "1d"]),
        ("%%distribute --strategy f", ["fsdp"]),
        ("%%distribute --strategy fsdp -O cpu", ["cpu_offload=", "cpu_ram_efficient_loading="]),
        ("%%distribute --strategy=fsdp+tp --option=seq", ["sequence_parallel="]),
        ("%%distribute --strategy ddp -O cpu", []),
        ("%%distribute -O static", ["static_graph="]),
        ("%%distribute --strategy fsdp -O auto_wrap_policy=S", ["SIZE_BASED_WRAP"]),
        ("%%distribute --strategy fsdp --option=auto-wrap-policy=S", ["SIZE_BASED_WRAP"]),
        ("%%distribute --strategy fsdp -O nonsense=", []),
        ("%%distribute -O tp=2 --opt", ["--option"]),
        ("%dist lo", ["logs"]),
        ("%dist logs job --stream ", ["out", "err"]),
        ("%dist logs job --ta", ["--tail"]),
        ("%dist plan --ra", ["--ranks"]),
        ("%dist nodes x", []),
    ],
)
def test_tab(line: str, offered: list[str]) -> None:
    assert tab(line, "big", "other") == offered


@pytest.mark.parametrize(
    ("line", "choice", "said"),
    [
        ("%%distribute --ra", "--ranks", "option N: CPU ranks, on Gloo"),
        ("%%distribute --fre", "--fresh", "option: start new interpreters, for code that cannot bear a fork"),
        ("%%distribute --", "--help", "option: what all of them do"),
        ("%%distribute --collect ", "all", "value"),
        ("%%distribute --exclude ", "big", "name"),
        (
            "%%distribute --strategy fsdp -O cpu",
            "cpu_offload=",
            "option 1|0: parameters, gradients and optimizer state",
        ),
        ("%%distribute --strategy fsdp -O auto_wrap_policy=", "NO_WRAP", "value"),
        ("%dist ", "logs", "verb: what its ranks printed"),
        ("%dist logs job --", "--tail", "option"),
        ("%dist logs ", "the-name", "job"),
        ("%dist plan --", "--ranks", "option N: CPU ranks, on Gloo"),
    ],
)
def test_what_a_choice_is_stands_beside_it(line: str, choice: str, said: str) -> None:
    assert completer.about(line, choice).startswith(said)


def test_every_option_says_what_it_is_in_little_room() -> None:
    for option in OPTIONS:
        said = completer.about("%%distribute --", option.flag)
        assert option.help[:20] in said and len(said) <= completer.ABOUT


@pytest.mark.parametrize("line", ["", "x = 1", "%%distr", "%dist", "%%time --", "print(--"])
def test_other_lines_are_left_to_ipython(line: str) -> None:
    assert completer.complete(line, "") is None


def test_the_environment_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TD_TEST_VARIABLE", "1")
    assert tab("%%distribute --env TD_TEST") == ["TD_TEST_VARIABLE"]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home and a notebook's directory in which hosts are written down."""
    ssh = tmp_path / ".ssh"
    (ssh / "more.d").mkdir(parents=True)
    (ssh / "config").write_text(
        'Include more.d/*\nHost node1 node2 *.lan !bad # a remark\n  User alice\nHost="quoted"\nHost \'open\n'
        "Include config\nMatch host other\n"
    )
    (ssh / "more.d" / "a").write_text("host included\n")
    (tmp_path / "torchdist.toml").write_text(
        '[hosts]\npython = "/p"\nbig = ["gpu1", "gpu2:4"]\n[hosts.gpu1]\npython = "/q"\nsetup = "true"\n'
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%%distribute --hosts ", ["gpu1", "included", "node1", "node2", "quoted", "@big"]),
        ("%%distribute --hosts=no", ["node1", "node2"]),
        ("%%distribute --hosts node1,no", ["node2"]),
        ("%%distribute --hosts @", ["big"]),
        ("%%distribute --hosts node1,@b", ["big"]),
        ("%%distribute --hosts alice@node", ["node1", "node2"]),
        ("%%distribute --hosts node1:", []),
        ("%dist nodes --hosts node1,no", ["node2"]),
        ("%dist stop --hosts=gp", ["gpu1"]),
        ("%dist stop --ho", ["--hosts", "--host-option"]),
    ],
)
def test_hosts_that_are_written_down_are_offered(line: str, offered: list[str]) -> None:
    assert tab(line) == offered
    for name in offered:
        assert completer.about(line, name).startswith("option" if name.startswith("--") else "host")


def test_configuration_files_here_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.toml", "ds.json", "notes.txt"):
        (tmp_path / name).touch()
    assert tab("%%distribute --config ") == ["a.yaml", "b.toml", "ds.json"]


@pytest.mark.parametrize("flag", list(BY_FLAG))
def test_every_option_is_explained_by_its_own_words(flag: str) -> None:
    said = inspector.explain(f"%%distribute {flag} x\nbody", len(f"%%distribute {flag}") - 1)
    assert said is not None and said.startswith(BY_FLAG[flag].written) and BY_FLAG[flag].help in said


@pytest.mark.parametrize(
    ("code", "at", "part"),
    [
        ("%%distribute --collect all\nx", "--coll", "rank0, all"),
        ("%%distribute --collect all\nx", "al", "--collect"),
        ("%%distribute --collect=all\nx", "=al", "--collect"),
        ("%%time\n%%distribute --grace 3s\nx", "--gra", "default: 5"),
        ("%%distribute --ranks 2", "%%dis", OPTIONS[0].help),
        ("%%distribute --strategy fsdp -O cpu_offload=1\nx", "-O cpu_off", "wait in host memory (default: 0)"),
        ("%%distribute --strategy tp -O tp=2\nx", "-O", "-O, --option KEY=VALUE"),
        ("%%distribute --strategy tp -O tp=2\nx", "-O", "-O loss_parallel=1|0"),
        ("x = 1\n%dist logs job", "logs", "--tail"),
        ("%dist", "%di", "what its ranks printed"),
        ("%dist plan --ranks 2", "--ra", "--ranks"),
    ],
)
def test_shift_tab(code: str, at: str, part: str) -> None:
    said = inspector.explain(code, code.index(at) + len(at))
    assert said is not None and part in said


@pytest.mark.parametrize(("code", "at"), [("%%distribute\nmodel.x", "mod"), ("len(x)", "le"), ("", ""), ("\n\n", "\n")])
def test_the_rest_is_left_to_ipython(code: str, at: str) -> None:
    assert inspector.explain(code, code.index(at) + len(at)) is None


@pytest.mark.parametrize("code", ["%%distribute ", "%%distribute --strategy fsdp -O "])
def test_the_table_is_as_narrow_as_a_side_bar(code: str) -> None:
    said = inspector.explain(code, len(code))
    assert said is not None and max(map(len, said.splitlines()[4:])) <= NARROW


def test_programs_after_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "one.py").write_text("")
    (tmp_path / "text.md").write_text("")

    def offered(line: str) -> list[str] | None:
        return completer.complete(line, line.rpartition(" ")[2])

    assert offered("%dist ru") == ["run"]
    assert offered("%dist run t") == ["tests/", "train.py"]
    assert offered("%dist run --ranks 2 tests/") == ["tests/one.py"]
    assert offered("%dist run --ra") == ["--ranks"] and offered("%dist run --watch c") == ["compact"]
    assert offered("%dist run --ranks 2 train.py -") == [] == offered("%dist run train.py t")
    described = {"%dist run t": "train.py", "%dist run te": "tests/", "%dist ": "run"}
    assert [completer.about(line, choice) for line, choice in described.items()] == [
        "script",
        "folder",
        f"verb: {parse.VERBS['run']}",
    ]
    assert completer.about("%dist run --ra", "--ranks").startswith("option N: ")
