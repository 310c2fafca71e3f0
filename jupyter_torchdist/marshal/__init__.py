"""Pickling between a notebook and its ranks, in both directions; used in the kernel and in the ranks.

In a rank::

    load_bundle(manifest, blob_dir: Path, main: ModuleType, *, source_dir: Path | None = None) -> Loaded
        checks the digests, unpacks local modules, puts their directory first on sys.path, fills linecache
        and fills ``vars(main)`` with the captured names. Loaded.names, Loaded.memo {place: object}.
    changed_names(loaded, main: ModuleType | dict) -> list[str]
        captured names whose object graph changed, and globals that captured functions set.
    dump_results(values: Mapping[str, Any], loaded, directory: JobPaths, rank: int, stays=None) -> Dumped
        Dumped.names, Dumped.left ((name, reason), …), Dumped.size; raises StoreError.
    dump_exception(exc, loaded: Loaded | None, path: Path) -> None
    dump_item(item) -> (bytes, why it cannot be pickled)
    attributes: names such as ``settings:BATCH``, for attributes of modules in both processes

In the notebook (or any later kernel)::

    load_results(directory: JobPaths, rank: int, memo: Mapping[int, Any] | None, main_dict) -> Values
        Values is a dict {name: value} with .notes and .left; captured objects are updated in place.
        memo is Capture.memo; None reads the job's bundle (memo_from_bundle).
        raises DamagedJob, RankFailed.
    load_exception(path, memo, main_dict, record: ErrorRecord) -> BaseException   (always an Exception)
    load_item(data, job, main_dict) -> the item of a generator; raises RankFailed
    memo_from_bundle(manifest, blob_dir, main_dict, *, source_dir=None) -> Memo   (a dict with .notes)
"""

from __future__ import annotations

from . import attributes
from .bundle import Loaded, Memo, load_bundle, memo_from_bundle, unpack_sources
from .compare import changed_names
from .failures import dump_exception, load_exception
from .items import dump_item, load_item
from .results import Dumped, Stays, Values, dump_results, load_results

__all__ = [
    "Dumped",
    "Loaded",
    "Memo",
    "Stays",
    "Values",
    "attributes",
    "changed_names",
    "dump_exception",
    "dump_item",
    "dump_results",
    "load_bundle",
    "load_exception",
    "load_item",
    "load_results",
    "memo_from_bundle",
    "unpack_sources",
]
