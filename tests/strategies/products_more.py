"""The products that ``products`` leaves out: there each way of data parallelism meets each way inside once."""

from __future__ import annotations

from . import prepared
from .hugging_face import check_its_batches_are_divided  # noqa: F401  # run here too
from .languages import Language
from .ranks import context
from .unchanged import equal, language


def check_unchanged_cells_under_products() -> None:
    for degrees in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2}):
        equal(context(degrees), language(lambda: Language(tied=True)))


def check_prepared_under_products() -> None:
    for degrees in ({"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2}):
        prepared.equal(context(degrees), prepared.language)
