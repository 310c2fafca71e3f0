"""Operators that the notebook's own code has registered with ``torch.library.custom_op``.

Code can call an operator as ``torch.ops.mine.sin``, without a name of the notebook. The operator itself is the state:
loading it from a stream registers it (``marshal.rebuild.operator``), so ``write`` has nothing to do.
"""

from __future__ import annotations

from .base import Adapter, Place, State


def read(place: Place) -> State:
    from ..torch_private.operators import operator_home, operators

    return {name: one for name, one in operators().items() if operator_home(one) == "__main__"}


def write(state: State, place: Place) -> None:
    return


ADAPTER = Adapter("torch operators", "torch", read, write, {})
