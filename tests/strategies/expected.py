"""What each cell of ``tests/cells`` must do under each strategy."""

from __future__ import annotations

from dataclasses import dataclass

from .traces import TOLERANCE


@dataclass(frozen=True)
class Equal:
    """Losses, numbers, printed lines, weights and optimizer state are those of one device."""

    tolerance: float = TOLERANCE
    leave_out: tuple[str, ...] = ()
    """Names that need not be equal."""


@dataclass(frozen=True)
class Refused:
    """``StrategyError`` before the first step, with these words in it."""

    words: str


@dataclass(frozen=True)
class Differs:
    """It trains, and differs from one device for a reason that the documentation gives, and the output: ``said``."""

    why: str
    said: str


Expectation = Equal | Refused | Differs

SAME = Equal()
_OWN_NOISE = Differs(
    "random numbers drawn inside the model differ by rank", "the model draws random numbers (dropout, noise): each rank"
)
_SHAPES = Refused("is a batch size written in the model as a number")

ALIKE: dict[str, Expectation] = {
    "attention_stored": Equal(leave_out=("model", "opt")),  # a bias of keys has gradients that are rounding, to Adam
    "bayes_early_stop": Refused("or computed from random numbers, in l1.kl"),
    "batch_centering": Refused("sub combines each sample with a mean over the batch"),
    "branch_in_forward": Refused("branches on a value of its samples"),
    "branch_on_a_number": Refused("branches on a value of its samples"),
    "centred_gradients": Differs("no backward is tried", "the backward of Centre is not checked"),
    "centred_later": Differs("a forward is tried in its first steps", "line 20 of forward has not run in the first"),
    "samples_in_a_buffer": Refused("its buffer seen changes with the samples of the batch"),
    "compiled": Equal(leave_out=("compiled",)),  # torch's wrapper comes back with fewer attributes than it had
    "contrastive_inside_model": Refused("mm multiplies every sample with every other"),
    "counts_in_an_array": Refused("or computed from random numbers, in usage"),
    "dropout": _OWN_NOISE,
    "embedding_max_norm": Refused("its forward writes its parameter 0.weight"),
    "embedding_bag": Refused("offsets[0] has to be 0"),
    "features_of_the_batch_before": Refused("its result for a sample changes when the batch has fewer samples"),
    "features_on_request": Refused("keeps a tensor of its samples in features, and did not in its first steps"),
    "gcn_adjacency": Refused("it is given a sparse tensor"),
    "flag_of_a_later_epoch": Refused("its buffer low changes with the samples of the batch"),
    "grad_scaler": Equal(2e-3),  # gradients are rounded to fp16 before they are summed
    "graph_batches": _SHAPES,
    "hook_every_third": Refused("keeps a tensor of its samples in saved, and did not in its first steps"),
    "list_on_request": Refused("keeps a tensor of its samples in records, and did not in its first steps"),
    "literal_batch_size": _SHAPES,
    "load_balancing": Refused("of the batch in 0.aux_loss: mul multiplies a mean over the batch"),
    "mask_of_batch_size": _SHAPES,
    "mixture_of_experts": Refused("branches on a value of its samples"),
    "noted_on_a_class": Refused("or computed from random numbers, in Net"),
    "numbers_noted_late": Differs(
        "a forward keeps numbers of its samples after the first steps",
        "sparsity: forwards leave numbers of their samples",
    ),
    "notes_of_activations": Refused("or computed from random numbers, in spread"),
    "normalizing_flow": Refused("linalg_solve_triangular is an operation of which"),
    "packed_by_lengths_of_others": Refused("packs samples with the lengths of other samples"),
    "packed_in_sorted_order": Refused("an output is in a sorted order: bring it back"),
    "qat": Refused("observes the range of values in whole batches"),
    "returned_numbers": Refused("it returns a number or an array (not a tensor) that changes"),
    "returned_stranger": Refused("it returns an Output, which cannot be put together"),
    "scripted": Refused("is a torch.jit script"),
    "second_loop_late": Refused("a step uses batches of two loops"),
    "state_between_batches": Refused("its forward reads what the forward before it has kept in state"),
    "unseeded_labels": Refused("have different data in the first batch of a loop"),
    "unseeded_samples": Refused("have different data in the first batch for Linear"),
    "vae": _OWN_NOISE,
    "vq_vae": Refused(": log of a mean over the batch"),
    "vq_vae_ema": Refused("its forward writes its parameter"),
}
"""Under every strategy; what is neither here nor in ``APART`` is equal."""

APART: dict[tuple[str, str], Expectation] = {
    ("shared_trunk", "fsdp"): Refused("trunk.weight of Critic is sharded already, as a part of another model"),
    ("backbone_reused", "fsdp"): Refused("0.0.weight of Sequential is sharded already, as a part of another model"),
    ("batch_norm_copies", "fsdp"): Refused("copy.deepcopy of Sequential, which is sharded"),
    ("checkpoint_around_models", "fsdp"): Refused("checkpoint is applied to the whole Sequential"),
    ("ema", "fsdp"): Refused("copy.deepcopy of Sequential, which is sharded"),
    ("lbfgs", "ddp"): Equal(1e-3),  # a search along a line takes the last digits further
    ("lbfgs", "fsdp"): Refused("LBFGS cannot train parameters that fsdp or tp has sharded"),
    ("new_head", "fsdp"): Refused("2.weight, 2.bias came into the Sequential after it had been divided"),
    ("parameter_outside", "fsdp"): Refused("used outside of the forward of the module it belongs to"),
    ("penalty_before", "fsdp"): Refused("parameters as they were before the model's first call"),
    ("per_sample_gradients", "fsdp"): Refused("functional_call of Sequential, whose parameters fsdp has sharded"),
    ("sparse_embedding", "fsdp"): Refused("SparseAdam cannot train parameters that fsdp or tp has sharded"),
    ("trace_of_the_hessian", "fsdp"): Refused("the gradients in .grad have no graph"),
}


def expected(cell: str, strategy: str) -> Expectation:
    return APART.get((cell, strategy), ALIKE.get(cell, SAME))
