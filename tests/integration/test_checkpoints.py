"""Checkpoints on real ranks; what each check asserts stands in ``tests/strategies/checkpoints.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import jupyter_torchdist as td
from jupyter_torchdist.functions.decorated import launch
from jupyter_torchdist.protocol.errors import RankFailed
from tests.strategies import checkpoints as checks

pytestmark = pytest.mark.strategies


def passes(ranks: int, place: Path, *names: str) -> None:
    for failed in launch(checks.run, (list(names), str(place)), ranks=ranks):
        assert not failed, "\n".join(failed)


def test_two_ranks_four_ranks_one_process_two_ranks(home: Path, tmp_path: Path) -> None:
    passes(2, tmp_path, "save_while_it_trains", "another_model_is_named_on_every_rank")
    passes(4, tmp_path, "resume_as_fsdp")
    checks.resume(tmp_path, "plain")
    training = checks.Training("plain", seed=9)
    found = td.load(tmp_path / "main", *training.parts)
    td.save(tmp_path / "plain", *training.parts, step=3, history=found["history"], table=found["table"]).wait()
    passes(2, tmp_path, "resume_as_ddp", "resume_as_replicate", "resume_as_fsdp")


def test_what_can_be_saved(home: Path, tmp_path: Path) -> None:
    passes(
        2,
        tmp_path,
        "tensor_parallel",
        "zero_optimizer_becomes_a_plain_one",
        "buffers_are_those_of_rank_0",
        "what_is_each_ranks_own_comes_back_to_it",
        "saving_changes_nothing",
        "a_loop_goes_on_after_the_last_batch",
        "ranks_that_save_different_things",
        "a_file_system_that_is_full_half_way",
        "an_error_of_an_asynchronous_save_is_raised_by_the_next",
    )


def test_a_rank_that_dies_while_it_saves_leaves_the_earlier_checkpoint(home: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 on .* was killed"):
        passes(2, tmp_path, "a_rank_that_ends_in_an_asynchronous_save")
    model = torch.nn.Linear(3000, 3000)
    assert td.load(tmp_path / "killed", model)["step"] == 1
    td.save(tmp_path / "killed", model, step=2).wait()
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["step-000001", "step-000002"]
