"""What a refusal says to do is done as it says, and leaves what one device leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import jupyter_torchdist as td
from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.protocol.spec import Options

from .advices import STRATEGIES
from .advices_parallelisms import PARALLELISMS
from .advices_prepared import BOTH, PREPARING
from .advices_steps import STEPS
from .advising import MLP, Advice, rows, training
from .running import PATIENCE, run_alone, run_cell
from .traces import TOLERANCE, differences, trace

ADVICES = [*STRATEGIES, *PARALLELISMS, *PREPARING, *STEPS]
ALWAYS = ("new_head", "pruned_late", "sorted_order", "tp_nothing")
"""Those that run in ``make test``, and not only in ``make soak``."""

SHOWN_OTHERWISE = frozenset({"cp_heads", "cp_length", "loss_of_odd_head", "pp_schedule", "tp_odd_width", "tp_style"})
"""Their words are in the message, and are placeholders in the docs."""

BELOW = ("td.prepare in ranks that were not started by torchdist", "was saved by a different cell")
"""Messages with a test of their own."""
WITHOUT = ("DeepSpeed averages gradients", "a sum whose terms are on several ranks")
"""Messages without a test here: DeepSpeed is not installed, and no strategy shows a cell such a sum."""

HEAVY = (pytest.mark.soak, pytest.mark.strategies)


@pytest.mark.parametrize(
    "advice", [pytest.param(one, id=one.name, marks=() if one.name in ALWAYS else HEAVY) for one in ADVICES]
)
def test_the_remedy_gives_what_one_device_gives(advice: Advice) -> None:
    refused = run_cell(advice.text, Options(ranks=advice.ranks, strategy=advice.strategy, **advice.given))
    assert advice.words in refused.refusal, (refused.refusal, refused.error, refused.printed, refused.errors)
    assert advice.told in refused.refusal.replace(advice.words, "")
    how = advice.instead or {"option": advice.option}
    outcome = run_cell(advice.remedied, Options(ranks=advice.ranks, strategy=advice.then or advice.strategy, **how))
    assert outcome.error is None, f"{outcome.error!r}\n{outcome.printed}\n{outcome.errors}"
    wanted = run_alone({"it": advice.remedied})["it"]
    off = differences(trace(outcome.names, outcome.printed), wanted, advice.tolerance)
    assert not off, "\n".join(sorted(off)[:12])


@pytest.mark.soak
@pytest.mark.strategies
def test_another_directory_for_another_cell(tmp_path: Path) -> None:
    options = Options(ranks=2, strategy="ddp", checkpoint=str(tmp_path / "one"), resume=True)
    assert run_cell(training(MLP), options).error is None
    other = training(MLP).replace("optimizer", "adam").replace("SGD", "Adam")
    refused = run_cell(other, options).refusal
    assert "was saved by a different cell" in refused and "give --checkpoint another directory" in refused
    outcome = run_cell(other, replace(options, checkpoint=str(tmp_path / "other")))
    assert not differences(trace(outcome.names, outcome.printed), run_alone({"it": other})["it"], TOLERANCE)


@pytest.mark.soak
@pytest.mark.strategies
def test_ranks_of_another_launcher_are_told_to_use_torchdist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StrategyError, match="were not started by torchdist") as refused:
        td.prepare([])
    assert "torchdist run SCRIPT" in refused.value.hint
    monkeypatch.undo()
    script = Request(BOTH, "train.py", options=Options(ranks=2), kind="script")
    assert submit(script).wait(PATIENCE).state == "succeeded"


def test_each_message_has_a_test() -> None:
    words = [*(one.words for one in ADVICES), *BELOW, *WITHOUT]
    left = [message for message, _ in rows() if not any(one in message for one in words)]
    assert len(left) == len(SHOWN_OTHERWISE), "\n".join(left)


def test_each_row_is_of_a_message_in_the_docs() -> None:
    """A message that is changed needs its row here changed, too."""
    pages = [message for message, _ in rows()]
    assert {one.name for one in ADVICES if not any(one.words in message for message in pages)} == SHOWN_OTHERWISE
