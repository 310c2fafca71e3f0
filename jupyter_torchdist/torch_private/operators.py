"""Operators of ``torch.library.custom_op``: reads their definitions, and registers them again."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch


def operators() -> dict[str, Any]:
    """Operators created by ``torch.library.custom_op`` in this process, by ``namespace::name``."""
    return dict(import_module("torch._library.custom_ops").OPDEFS)


def operator_home(operator: Any) -> str:
    """The module whose code defines the operator."""
    return str(operator._init_fn.__module__)


def operator_maker(operator: Any) -> tuple[str, str, list[str | None], list[str]]:
    """Arguments for ``make_operator``: name, schema, device types with a kernel (None: all others), names of tags."""
    tags = [tag.name for tag in operator._tags]
    return operator._qualname, operator._schema, list(operator._backend_fns), tags


def operator_functions(operator: Any) -> dict[str, Any]:
    """Argument for ``set_operator_functions``. Raises ``ValueError`` if an operator has parts that cannot be read."""
    if operator._torch_dispatch_fns:
        raise ValueError(f"{operator._qualname} has rules of register_torch_dispatch, as triton_op makes them")
    # Before torch 2.13 the autocast dtypes are in two attributes.
    early = {kind: getattr(operator, f"_autocast_{kind}_dtype", None) for kind in ("cpu", "cuda")}
    casts = getattr(operator, "_autocast_dtype", early)
    return {
        "function": operator._init_fn,
        "kernels": {kind: _kernel(chooser) for kind, chooser in operator._backend_fns.items()},
        "fake": operator._abstract_fn,
        "autograd": operator._backward_fn and (operator._backward_fn, operator._setup_context_fn),
        "vmap": operator._vmap_fn,
        "autocast": {kind: dtype for kind, dtype in casts.items() if dtype is not None},
    }


def _kernel(chooser: Any) -> Any:
    """The registered function. Torch stores a wrapper that calls it if the kernel is enabled."""
    return inspect.getclosurevars(inspect.unwrap(chooser)).nonlocals["fn"]


def make_operator(name: str, schema: str, kinds: list[str | None], tags: list[str]) -> Any:
    """Register an operator. It cannot be called before ``set_operator_functions``."""

    def missing(*_args: Any, **_keywords: Any) -> Any:
        raise RuntimeError(f"{name} has no functions yet")

    parsed = torch._C.parse_schema(name.partition("::")[2] + schema)
    mutated = [one.name for one in parsed.arguments if one.alias_info is not None and one.alias_info.is_write]
    return torch.library.custom_op(
        name,
        missing,
        mutates_args=mutated,
        device_types=None if kinds == [None] else kinds,  # type: ignore[arg-type]
        schema=schema,
        tags=[getattr(torch.Tag, tag) for tag in tags],
    )


def set_operator_functions(operator: Any, functions: dict[str, Any]) -> None:
    """Register the functions that ``operator_functions`` returned."""
    operator._init_fn = functions["function"]
    for kind, kernel in functions["kernels"].items():
        operator.register_kernel(kind)(kernel)
    if functions["fake"] is not None:
        operator.register_fake(functions["fake"])
    if functions["autograd"] is not None:
        backward, setup_context = functions["autograd"]
        operator.register_autograd(backward, setup_context=setup_context)
    if functions["vmap"] is not None:
        operator.register_vmap(functions["vmap"])
    for kind, dtype in functions["autocast"].items():
        operator.register_autocast(kind, dtype)
