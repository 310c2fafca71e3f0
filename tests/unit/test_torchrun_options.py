"""torchrun's options in ``torchdist run``: all of torch's parser, each with its meaning or refused by its name."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist import cli
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.plan import Gpu, Inventory
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.verbs import torchrun
from jupyter_torchdist.verbs.torchrun import HANDLED, TORCHRUN, translate
from jupyter_torchdist.views.wording import in_shell

PROGRAM = {"-h", "--help", "-m", "--module"}
PACKAGE = Path(cli.__file__).parent


def torchs() -> Iterator[tuple[str, argparse.Action]]:
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for flag in action.option_strings:
            yield flag, action


def test_every_option_of_torchrun_is_known_here() -> None:
    """Dashed and underscored, with a value where it has one. An older torch may lack some of ours."""
    wrong = []
    for flag, action in torchs():
        known = flag in PROGRAM or torchrun.canonical(flag) in TORCHRUN
        if not known or (flag not in PROGRAM and torchrun.takes_value(flag) != (action.nargs != 0)):
            wrong.append(flag)
    assert not wrong


def test_the_docs_name_every_option() -> None:
    text = (PACKAGE.parent / "docs" / "coming-from" / "torchrun-options.md").read_text(encoding="utf-8")
    assert [flag for flag in TORCHRUN if f"`{flag}" not in text] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes 1 --ranks 2", "--ranks 2"),
        ("--nnodes=1:1 --nproc-per-node=3", "--ranks 3"),
        ("--nproc_per_node 2 --node_rank 0", "--ranks 2"),
        ("--nproc-per-node cpu", f"--ranks {os.cpu_count()}"),
        ("--nproc-per-node auto", f"--ranks {os.cpu_count()}"),
        ("--start-method spawn", "--fresh"),
        ("--start-method fork --run-path", ""),
        ("--shutdown-timeout 30", "--grace 30"),
        ("--numa_binding node", "--numa-binding node"),
        ("--max-restarts 3 --monitor-interval 0.5 --tee 0 -r0 -t 0", "--restarts 3"),
        ("--rdzv-backend etcd --rdzv-endpoint localhost --rdzv-conf=a=1,b=2 --event_log_handler null", ""),
        ("--no-python --log-dir logs --virtual_local_rank --rdzv-conf=", ""),
        ("--master-addr 127.0.0.1 --local-addr=localhost --logs-specs default", ""),
        (f"--signals-to-handle {','.join(HANDLED)} --standalone", ""),
        ("--env A=1 -O x=1 --fresh", "--env A=1 -O x=1 --fresh"),
    ],
)
def test_what_has_an_option_of_ours(line: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "local_inventory", lambda environ: Inventory("here", 2, 0))
    assert translate(line.split()).words == words.split()


def test_processes_of_a_machine_with_gpus_are_gpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(str(number), number, "H100", 0, 0) for number in range(3))
    monkeypatch.setattr(torchrun, "local_inventory", lambda environ: Inventory("here", 2, 0, gpus))
    for text, words in (("2", ["--gpus", "2"]), ("gpu", ["--gpus", "3"]), ("auto", ["--gpus", "3"])):
        assert translate(["--nproc-per-node", text]).words == words
    assert translate(["--nproc-per-node", "cpu"]).words[0] == "--ranks"


def test_what_ranks_see() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = f"--role trainer --rdzv-id 7 --rdzv-endpoint localhost:{port} --local-ranks-filter 0,2"
    meant = translate(line.split())
    options = meant.on(Options())
    assert (options.role, options.run_id, options.port, meant.output.only) == ("trainer", "7", port, frozenset({0, 2}))
    alone = translate([*line.split(), "--standalone"]).on(Options())
    assert (alone.role, alone.run_id, alone.port) == ("trainer", "", 0)


REFUSED = [
    "--nproc-per-node gpu",
    "--nproc-per-node 0",
    "--rdzv-conf timeout",
    "--max-restarts -1",
    "--monitor-interval often",
    "--start-method thread",
    "--redirects 4",
    "-t 0:1,x",
    "--local-ranks-filter some",
    "--master-port 99999",
    "--signals-to-handle SIGNONE",
    "--signals-to-handle SIGKILL",
]


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_value_is_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "local_inventory", lambda environ: Inventory("here", 2, 0))
    with pytest.raises(OptionError) as raised:
        translate(line.split()).on(Options())
    assert raised.value.message.startswith(f"{line}: ") and raised.value.hint


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2",
        "--nnodes 1:4",
        "--node-rank 1",
        "--nproc-per-node xpu",
        "--rdzv-endpoint node7:29400",
        "--master-addr node7",
        "--local-addr 10.0.0.1",
        "--logs-specs mine",
        "--event-log-handler mine",
        "--print-completion bash",
    ],
)
def test_what_torchrun_itself_runs(line: str) -> None:
    assert translate(line.split()).handed == line
    assert not translate(["--standalone"]).handed


def test_an_address_elsewhere_is_ignored_with_standalone() -> None:
    assert translate(["--master-addr", "node7", "--standalone"]).handed == ""


def test_where_output_goes() -> None:
    output = translate(["-r", "0:1,1:3", "--tee", "1:2", "--local-ranks-filter", "0,1", "--log-dir", "d"]).output
    assert [output.prints(0, "out"), output.prints(0, "err"), output.prints(1, "out"), output.prints(1, "err")] == [
        False,
        True,
        False,
        True,
    ]
    assert not output.prints(2, "out")
    assert output.copies(0, "out") and not output.copies(0, "err") and output.copies(1, "err")
    assert translate(["--log-line-prefix-template", "${role_name}/${rank}>"]).output.label("r", 3, "a\nb\n") == (
        "r/3>a\nr/3>b\n"
    )


def test_variables_of_torchrun_are_defaults() -> None:
    environ = {"PET_NPROC_PER_NODE": "3", "PET_STANDALONE": "1", "PET_MAX_RESTARTS": "2", "PET_NO_PYTHON": "0"}
    words = torchrun.from_environment(["--nproc_per_node", "2"], environ)
    assert sorted(words) == sorted(["--standalone", "--max-restarts=2", "--nproc_per_node", "2"])


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"port {port} cannot be used: Address already in use"):
            translate(["--master-port", str(port)]).on(Options())


def test_values_that_are_missing_or_too_many() -> None:
    with pytest.raises(OptionError, match="--tee needs a value"):
        translate(["--tee"])
    with pytest.raises(OptionError, match="--standalone takes no value"):
        translate(["--standalone=1"])


# ------------------------------------------------------------------------------------------------- words in a shell

OF_A_NOTEBOOK = re.compile(r"%dist\b|%%distribute -")


def test_no_words_of_ours_name_a_notebooks_command_in_a_shell() -> None:
    """Every string of the package that names one, as a shell shows it."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for text in re.findall(r'"[^"\n]*"', file.read_text(encoding="utf-8")):
            if OF_A_NOTEBOOK.search(text) and "kernel" not in file.parts and file.name != "cli.py":
                found.append(in_shell(text))
    assert found
    assert [text for text in found if OF_A_NOTEBOOK.search(text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "run --help",
        "run --strategy fsdp --help",
        "run --nonsense x.py",
        "run x y",
        "run --ranks 2 --strategy fsdp -O nonsense=1 x.py",
        "plan --nonsense",
        "plan --help",
        "show nothing",
        "--help",
        "jobs",
        "cancel nothing",
    ],
)
def test_a_shell_is_answered_in_its_own_words(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(line.split())
    captured = capsys.readouterr()
    assert captured.out or captured.err
    assert not OF_A_NOTEBOOK.search(captured.out + captured.err)


def test_help_names_torchruns_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    assert [flag for flag in TORCHRUN if flag not in out] == []
