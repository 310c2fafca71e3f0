"""What a refusal says to do is done as it says, and leaves what one device leaves."""

from __future__ import annotations

import pytest

from jupyter_torchdist.protocol.spec import Options

from .advices import ADVICES, ALWAYS, SHOWN_OTHERWISE, Advice, rows
from .running import run_alone, run_cell
from .traces import differences, trace

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


def test_each_row_is_of_a_message_in_the_docs() -> None:
    """A message that is changed needs its row here changed, too."""
    pages = [message for message, _ in rows()]
    assert {one.name for one in ADVICES if not any(one.words in message for message in pages)} == SHOWN_OTHERWISE
