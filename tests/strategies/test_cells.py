"""Unmodified single-device cells under each strategy leave what one device leaves, or are refused in words."""

from __future__ import annotations

import ast
import fcntl
import math
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.protocol.spec import Options

from .expected import Differs, Equal, Refused, expected
from .running import Outcome, all_cells, run_alone, run_cell, text_of
from .traces import Trace, differences, trace

pytestmark = pytest.mark.strategies

STRATEGIES = ("ddp", "fsdp")
MORE = frozenset(
    {
        "activation_penalty", "augmenting_workers", "batch_centering", "bayes_early_stop", "data_parallel_left_in",
        "ema_in_forward_assign", "embedding_max_norm", "gcn_adjacency", "masking_collate", "qat",
        "seed_in_earlier_cell", "shrink_perturb", "vq_vae", "vq_vae_ema",
        "batch_sampler", "best_weights", "branch_in_forward", "byol",
        "compiled", "compiled_step", "custom_autograd", "detection_lists", "diffusion", "distillation", "distributions",
        "double_precision", "dqn", "early_stopping", "embedding_bag", "encode_decode", "force_field", "forward_hooks",
        "gpt_untied", "grad_norm_logging", "hidden_gradients", "hugging_face", "hugging_face_families",
        "gradients_by_autograd",
        "ignore_index", "in_place_outputs", "info_nce", "is_main_prints", "load_balancing", "loader_workers",
        "lookahead", "pruned", "sharpness", "speech",
        "loss_inside_model", "maml", "manual_update", "mask_of_batch_size", "model_zoo", "new_head",
        "normalizing_flow", "one_function_two_losses", "onecycle", "padded_labels", "parametrizations",
        "per_sample_weights", "pinn", "plateau_scheduler",
        "ppo", "recommender", "regularised_by_hand", "resume", "rnn_time_first", "sam",
        "seq2seq", "several_models", "siamese", "simclr", "sliced_by_hand", "swa", "tqdm_loop", "training_step",
        "transformer_time_first", "triplet_mining", "truncated_bptt", "two_backward_calls", "two_loops", "two_phases",
        "unfreeze", "unseeded_labels", "unseeded_samples", "vae", "vit", "vocabulary_from_a_set",
        "weighted_cross_entropy", "weighted_sampler",
    }
)  # fmt: skip
"""Cells that are much like another one: run by ``make soak``."""


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trace]:
    """What a cell leaves on one device. Those that are compared with are run at once, by the first test that asks."""
    traces: dict[str, Trace] = {}
    folder = tmp_path_factory.getbasetemp()

    def of(name: str) -> Trace:
        if name not in traces:
            wanted = {name, *compared(request.session.items)}
            of_all_workers = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
            traces.update(run_once(of_all_workers / "alone", wanted))
        return traces[name]

    return of


def run_once(path: Path, cells: Iterable[str]) -> dict[str, Trace]:
    """Run the cells on one device, or take what another worker of this session left at ``path``."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(run_alone({cell: text_of(cell) for cell in cells})))
        found: dict[str, Trace] = pickle.loads(path.read_bytes())
    return found


def compared(items: Iterable[pytest.Item]) -> set[str]:
    """Cells whose trace on one device one of these tests looks at."""
    calls = [item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    asked = {(str(call["cell"]), str(call["strategy"])) for call in calls if call.keys() >= {"cell", "strategy"}}
    return {cell for cell, strategy in asked if not isinstance(expected(cell, strategy), Refused)}


def cases() -> list[object]:
    return [
        pytest.param(cell, strategy, marks=[pytest.mark.soak] if cell in MORE else [])
        for cell in all_cells()
        for strategy in STRATEGIES
    ]


@pytest.mark.parametrize(("cell", "strategy"), cases())
def test_cell(cell: str, strategy: str, alone: Callable[[str], Trace]) -> None:
    outcome = run_cell(text_of(cell), Options(ranks=2, strategy=strategy))
    expectation = expected(cell, strategy)
    if isinstance(expectation, Refused):
        assert isinstance(outcome.error, StrategyError), (outcome.error, outcome.printed)
        assert expectation.words in str(outcome.error)
        return
    assert outcome.error is None, f"{outcome.error!r}\n{outcome.printed}\n{outcome.errors}"
    if isinstance(expectation, Equal):
        check_equal(outcome, alone(cell), expectation)
    else:
        check_like(outcome, alone(cell), expectation)


def check_equal(outcome: Outcome, wanted: Trace, expectation: Equal) -> None:
    found = trace(outcome.names, outcome.printed)
    off = differences(found, wanted, expectation.tolerance, expectation.leave_out)
    assert not off, "\n".join(["not as on one device:", *sorted(off)[:12], outcome.printed])


def check_like(outcome: Outcome, wanted: Trace, expectation: Differs) -> None:
    """It trained all steps, with other numbers, and left the same kinds of things."""
    found = trace(outcome.names, outcome.printed)
    assert found.kinds == wanted.kinds
    assert found.sharing == wanted.sharing
    losses, others = outcome.names["losses"], wanted.values["losses"].tolist()
    assert len(losses) == len(others) and all(map(math.isfinite, losses))
    assert losses != others, f"no difference, though {expectation.why}"
    assert sum(expectation.said in line for line in outcome.said) == 1, outcome.said


KEPT = """
from collections import deque
names = {parameter: name for name, parameter in model.named_parameters()}
places = {(name, parameter): name for parameter, name in names.items()}
trained, fixed = set(names), frozenset(names)
recent = deque((parameter.detach().clone() for parameter in names), maxlen=2)
"""


def test_what_objects_of_the_cell_keep_of_sharded_weights_is_whole() -> None:
    outcome = run_cell(text_of("ema_by_name") + KEPT, Options(ranks=2, strategy="fsdp"))
    named = {parameter: name for name, parameter in outcome.names["model"].named_parameters()}
    assert outcome.names["names"] == named
    assert outcome.names["places"] == {(name, parameter): name for parameter, name in named.items()}
    assert outcome.names["trained"] == outcome.names["fixed"] == set(named)
    assert [type(one) for one in outcome.names["recent"]] == [torch.Tensor] * 2
    shadow = outcome.names["ema"].shadow
    assert {name: (type(one), one.shape) for name, one in shadow.items()} == {
        name: (torch.Tensor, one.shape) for name, one in outcome.names["model"].named_parameters()
    }


@pytest.mark.parametrize("cell", ["rnn_time_first", "hidden_states"])
def test_samples_in_another_dimension_are_divided(cell: str) -> None:
    """The batch of 8 behind 8 steps of time; that of 7 in front of the inputs, and behind layers of hidden states."""
    text = text_of(cell).replace("self.rnn(x", "self.rnn(noted(x)")
    noted = "def noted(x):\n    print(tuple(x.shape))\n    return x\n\n"
    outcome = run_cell(noted + text, Options(ranks=2, strategy="ddp"))
    assert outcome.error is None, outcome.error
    seen = [line for line in outcome.printed.splitlines() if line.startswith("(")]
    assert set(seen) == ({"(8, 4, 2)"} if cell == "rnn_time_first" else {"(4, 5, 3)", "(1, 5, 3)"})


def test_packed_sequences_are_divided_and_padded_to_the_longest_of_all() -> None:
    """Batches of 8 sequences; each rank has 4 of them, and pads its outputs as one device does."""
    text = text_of("rnn_packed").replace("self.fc(torch", "noted(inputs, output) or self.fc(torch")
    noted = "def noted(*them):\n    print([tuple(one.shape[:2]) for one in them])\n\n"
    outcome = run_cell(noted + text, Options(ranks=2, strategy="ddp", option=("batch=whole",)))
    assert outcome.error is None, outcome.error
    seen = [ast.literal_eval(line) for line in outcome.printed.splitlines() if line.startswith("[(")]
    assert len(seen) == 6
    assert all(given == made and given[0] == 4 for given, made in seen), seen


def test_loops_whose_batches_are_padded_keep_them_whole() -> None:
    outcome = run_cell(text_of("padded_by_collate"), Options(ranks=2, strategy="ddp"))
    assert outcome.error is None, outcome.error
    why = "every rank loads whole batches, because its batches are padded to the longest of their samples"
    assert any(why in line for line in outcome.said), outcome.said


def test_the_cells_are_as_notebooks_have_them() -> None:
    """No line of them is distributed code, and each leaves a curve and a model."""
    for cell in all_cells():
        text = text_of(cell)
        assert "torch.distributed" not in text
        assert text.count("jupyter_torchdist") <= (cell == "is_main_prints")
        assert "losses" in text and "model" in text
    assert len([cell for cell in all_cells() if cell not in MORE]) >= 25
