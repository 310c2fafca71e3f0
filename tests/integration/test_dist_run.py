"""``%dist run``: in a notebook what ``torchdist run`` is in a shell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jupyter_torchdist.client.job import attach
from jupyter_torchdist.store import catalog
from tests.leaks import wait_until
from tests.notebook import Cell, Notebook

TRAIN = """\
import os, sys
import helper
model = {"lr": float(sys.argv[2]) if len(sys.argv) > 2 else helper.value}
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], __name__, flush=True)
"""


@pytest.fixture
def notebook(one_kernel: Notebook, tmp_path: Path) -> Notebook:
    """The kernel, in a directory with scripts."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper.py").write_text("value = 42.0\n")
    (tmp_path / "bad.py").write_text("def f():\n    raise KeyError('gone')\n\nf()\n")
    (tmp_path / "broken.py").write_text("x = 1\nif x\n    y = 2\n")
    (tmp_path / "sleep.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.py").write_text("")
    one_kernel.run(f"%cd -q {tmp_path}")
    return one_kernel


def refusal(cell: Cell, kind: str) -> str:
    assert cell.error is not None and cell.error.name == kind, cell.text
    assert "kernel/magic.py" not in cell.text
    return cell.text


def lines(name: str) -> list[str]:
    return sorted(attach(name).logs(stream="out").splitlines())


@pytest.mark.timeout(240)
def test_scripts_and_modules(notebook: Notebook) -> None:
    cell = notebook.run("model = 'mine'\n%dist run --ranks 2 --name one train.py -- --lr 1e-3")
    assert lines("one") == [f"[rank {rank}] rank {rank} of 2 ['--lr', '1e-3'] __main__" for rank in (0, 1)]
    assert "succeeded" in cell.text and "rank 0 of 2" in cell.text  # the view, which is saved with the notebook
    assert cell.result is None and notebook.value("model") == "mine"
    notebook.run("rate = 0.5\n%dist run --ranks 1 --name two -m train -- --lr $rate")
    assert lines("two") == ["rank 0 of 1 ['--lr', '0.5'] __main__"]
    notebook.run("%dist run --ranks 1 --out model train.py")
    assert notebook.value("model") == {"lr": 42.0}
    notebook.run("%dist run --nproc_per_node 1 --no_python --name three echo a 'b c'")
    assert lines("three") == ["a b c"]
    assert attach("one").spec.kind == "script" and attach("two").spec.kind == "module"


@pytest.mark.timeout(240)
def test_what_a_rank_raised_has_the_scripts_lines(notebook: Notebook) -> None:
    words = refusal(notebook.try_run("%dist run --ranks 1 bad.py"), "KeyError")
    assert re.search(r"bad\.py, line 2, in f\s+1 def f\(\):\s+-+> 2     raise KeyError\('gone'\)", words), words
    notebook.run("job = %dist run --ranks 1 --background --name night sleep.py")
    assert notebook.value("job.id") == attach("night").id
    assert notebook.run("%dist cancel night --kill").stdout.count("cancelled") == 1
    sleeping = notebook.start("%dist run --ranks 1 --name slow sleep.py")
    assert wait_until(lambda: any(job.name == "slow" and job.state == "running" for job in catalog.jobs()))
    notebook.interrupt()
    refusal(notebook.finish(sleeping), "JobCancelled")
    assert attach("slow").state.state == "cancelled"


@pytest.mark.timeout(240)
def test_options_of_output_and_files(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "torchdist.toml").write_text("ranks = 2\n")  # beside the notebook
    notebook.run(f"import os\nos.environ['JPY_SESSION_NAME'] = '{tmp_path}/night.ipynb'")
    cell = notebook.run("%dist run --tee 3 --log-dir out --local-ranks-filter 1 train.py")
    assert cell.stdout.startswith("[rank 1] rank 1 of 2") and "rank 0 of 2" not in cell.stdout
    copies = sorted(path.parent.name for path in tmp_path.glob("out/*/attempt_0/*/stdout.log"))
    assert copies == ["0", "1"] and "note: copies of the output are in" in cell.stdout
    plan = notebook.run("%dist run --plan train.py").stdout
    assert "2 ranks, backend gloo" in plan
    notebook.run("end = %dist run --json train.py\nplanned = %dist run --json --plan train.py")
    assert notebook.value("end['state']") == "succeeded" and notebook.value("planned['plan']['world_size']") == 2
    assert {job.notebook for job in catalog.jobs()} == {f"{tmp_path}/night.ipynb"}
    notebook.run("del os.environ['JPY_SESSION_NAME']")
    help_text = notebook.run("%dist run --help").stdout
    assert help_text.startswith("%dist run [options] script.py -- args") and "--nproc-per-node" in help_text


@pytest.mark.timeout(120)
def test_what_is_refused(notebook: Notebook, tmp_path: Path) -> None:
    for words, kind, said in [
        ("run", "OptionError", "%dist run --ranks 2 train.py -- args"),
        ("run --ranks 1", "OptionError", "run needs a script"),
        ("run --ranks 1 -m", "OptionError", "-m needs the name of a module"),
        ("run --ranks 1 tran.py", "OptionError", f"{tmp_path}/tran.py does not exist"),
        ("run --ranks 1 tran.py", "OptionError", "there is train.py"),
        ("run --ranks 1 folder", "OptionError", "is a directory without __main__.py"),
        ("run --ranks 1 folder", "OptionError", "name one of its scripts: one.py"),
        ("run --ranks 1 broken.py", "CellSyntaxError", "broken.py, line 2: expected ':'"),
        ("run --rank 1 train.py", "OptionError", "did you mean --ranks?"),
        ("run --ranks 1 'train.py", "OptionError", "close the quotation mark"),
        ("run --nnodes 2 train.py", "OptionError", "--nnodes 2 is done by torchrun itself, which runs in a shell"),
        ("run --ranks 1 --signals-to-handle SIGUSR1 train.py", "OptionError", "belongs to no kernel"),
        ("run --ranks 1 --event-log-handler console train.py", "OptionError", "in a shell only"),
        ("run --ranks 1 --background --tee 3 train.py", "OptionError", "leave out --background"),
        ("run --ranks 1 --no-python nowhere", "OptionError", "is no command that can be found"),
    ]:
        assert said in re.sub(r"\s+", " ", refusal(notebook.try_run(f"%dist {words}"), kind)), words
    assert catalog.jobs() == []
