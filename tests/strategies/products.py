"""What needs four ranks: data parallelism beside tensor, context and pipeline parallelism."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import jupyter_torchdist as td

from . import prepared
from .languages import Fused, Language
from .pipelines import (  # noqa: F401  # run here too
    check_stages_are_divided_no_further,
    check_stages_as_the_model_was_built,
    check_whole_pipelines_beside_each_other,
)
from .ranks import context, local_bytes
from .splitting import LANGUAGES, case, trained
from .unchanged import asking, counted, equal, language


def check_sharded_and_split() -> None:
    model = trained(LANGUAGES["tied"], context({"dp_shard": 2, "tp": 2}))
    assert isinstance(model, Language)
    up = model.layers[0].get_parameter("mlp.w1.weight")
    assert isinstance(up, DTensor) and up.device_mesh.shape == (2, 2)
    assert local_bytes([up]) == up.numel() * 4 // 4


def check_replicated_and_split() -> None:
    model = trained(case(lambda: Language(Fused)), context({"dp_replicate": 2, "tp": 2}))
    weight = model.get_parameter("layers.0.mlp.0.weight")
    assert local_bytes([weight]) == weight.numel() * 4 // 2


def check_copies_on_four_ranks() -> None:
    """Of a last batch of five samples one rank has two."""
    loaded: list[int] = []
    equal(context({"dp_replicate": 4}), counted(F.cross_entropy, loaded))
    assert loaded[1] == 20 + (2 if dist.get_rank() == 0 else 1)


def check_unchanged_cells_under_products() -> None:
    for degrees in ({"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}):
        equal(context(degrees), language(lambda: Language(tied=True), epochs=1))


def check_gradients_that_the_cell_asks_for_itself() -> None:
    equal(context({"dp_replicate": 2, "cp": 2}), asking(nn.Module.parameters, penalty=True))


def check_each_rank_knows_its_place() -> None:
    """Neighbours share a layer or a sequence; the stages of a pipeline are as far apart as can be."""
    near, far = dist.get_rank() % 2, dist.get_rank() // 2
    for degrees, place in (
        ({"dp_shard": 2, "tp": 2}, {"dp": far, "tp": near}),
        ({"dp_replicate": 2, "cp": 2}, {"dp": far, "cp": near}),
        ({"dp_replicate": 2, "pp": 2}, {"dp": near, "pp": far}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"dp": 2 * far + near}),
    ):
        with prepared.job(context(degrees)):
            found = {"dp": td.dp_rank, "tp": td.tp_rank, "cp": td.cp_rank, "pp": td.pp_rank}
            assert found == {"dp": 0, "tp": 0, "cp": 0, "pp": 0} | place, (degrees, found)


def check_prepared_under_products() -> None:
    for degrees in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2}):
        prepared.equal(context(degrees), prepared.language)
