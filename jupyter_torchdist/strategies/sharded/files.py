"""``torch.save`` and ``torch.load`` of user code, as on one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ...torch_private.places import default_store
from ..core.scatter import tensors_in
from .aliases import Alias


def _is_elsewhere(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) or (parameter is not None and parameter.is_meta)


def _parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters by their names in a state dict."""
    parts = module.named_modules(remove_duplicate=False)
    return {f"{path}.{name}" if path else name: one for path, part in parts for name, one in part._parameters.items()}


class Files:
    """Files that ``torch.save`` wrote, so that ``torch.load`` finds them complete on every rank.

    If ranks save to the same path, only rank 0 writes. A different path (in a temporary directory) is written by its
    rank. Each save has a number. Arguments have torch's names, because cells may use keywords.
    """

    saves = 0
    """The number of saves in this process so far: each has its own keys in the store."""

    def __init__(self, *, whole: bool = True) -> None:
        """``whole`` false: state dicts of the cell have shards, which must not be saved in a single file."""
        self._whole = whole
        self._left: dict[str, int] = {}  # paths that rank 0 writes, with the number of the last save

    def save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.save``. A path is written once; an open file is written by every rank.

        Raises ``StrategyError`` for sharded state dicts, and for objects whose values are not all on this rank.
        """
        _check_whole(obj)
        for tensor in tensors_in(obj):
            if isinstance(tensor, Alias):
                tensor.torchdist_memory.refresh()
        if not self._whole and any(isinstance(tensor, DTensor) for tensor in tensors_in(obj)):
            raise StrategyError(
                "torch.save of a sharded state dict (state_dict_type=SHARDED_STATE_DICT): the file would hold only "
                "the shards of one rank",
                "td.save(directory, model, optimizer) saves shards; or leave state_dict_type out, to save all values",
            )
        if not isinstance(f, (str, os.PathLike)):
            return original(obj, f, *args, **kwargs)
        path = os.path.abspath(f)
        Files.saves += 1
        if dist.get_rank() != 0:
            if self._path_of_the_first() == path:
                self._left[path] = self.saves
                return None
            return original(obj, path, *args, **kwargs)
        default_store().set(_key("path", self.saves), path)
        aside = f"{path}.part"
        try:
            original(obj, aside, *args, **kwargs)
            os.replace(aside, path)
        finally:
            Path(aside).unlink(missing_ok=True)
            default_store().set(_key("written", self.saves), b"1")
        return None

    def load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.load``. If rank 0 writes the path, wait until it is written."""
        if isinstance(f, (str, os.PathLike)) and (number := self._left.get(os.path.abspath(f))):
            default_store().wait([_key("written", number)])
        return original(f, *args, **kwargs)

    def _path_of_the_first(self) -> str | None:
        """The path that rank 0 saves to; None if it does not save, because only other ranks run this branch."""
        key = _key("path", self.saves)
        try:
            default_store().wait([key], _PATIENCE)
        except RuntimeError:
            return None
        return str(default_store().get(key).decode())


def _check_whole(obj: Any) -> None:
    """Raise ``StrategyError`` for a model that is divided, and for values that are only on other ranks."""
    if isinstance(obj, nn.Module) and any(map(_is_elsewhere, _parameters(obj).values())):
        raise StrategyError(
            f"torch.save of a whole {type(obj).__name__.removeprefix('FSDP')}, which is divided among ranks",
            "save model.state_dict(), which is whole; or save the model in a later cell",
        )
    if any(tensor.is_meta for tensor in tensors_in(obj)):
        raise StrategyError(
            "torch.save of parameters of other pipeline stages, whose values are on other ranks",
            "save model.state_dict(), or a part's, which is whole",
        )


_PATIENCE = timedelta(seconds=10)


def _key(what: str, number: int) -> str:
    return f"torchdist/saved/{number}/{what}"
