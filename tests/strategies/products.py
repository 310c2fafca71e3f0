"""What needs four ranks: data parallelism beside tensor, context and pipeline parallelism."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from . import prepared
from .languages import Fused, Language
from .pipelines import (  # noqa: F401  # run here too
    check_stages_as_the_model_was_built,
    check_whole_pipelines_beside_each_other,
)
from .ranks import local_bytes, setting
from .splitting import LANGUAGES, case, trained
from .unchanged import equal, language


def check_sharded_and_split() -> None:
    model = trained(LANGUAGES["tied"], setting({"dp_shard": 2, "tp": 2}))
    assert isinstance(model, Language)
    up = model.layers[0].get_parameter("mlp.w1.weight")
    assert isinstance(up, DTensor) and up.device_mesh.shape == (2, 2)
    assert local_bytes([up]) == up.numel() * 4 // 4


def check_replicated_and_split() -> None:
    model = trained(case(lambda: Language(Fused)), setting({"dp_replicate": 2, "tp": 2}))
    weight = model.get_parameter("layers.0.mlp.0.weight")
    assert local_bytes([weight]) == weight.numel() * 4 // 2


def check_unchanged_cells_under_products() -> None:
    for degrees in ({"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2}):
        equal(setting(degrees), language(lambda: Language(tied=True)))


def check_prepared_under_products() -> None:
    for degrees in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2}):
        prepared.equal(setting(degrees), prepared.language)
