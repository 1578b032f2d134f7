"""Operations that shared memory supports; all others are left to gloo.

[Note: One choice on all ranks] Whether an operation goes through shared memory must be decided
alike on all ranks, from properties that torch requires to be equal: which operation, how many
tensors, their dtypes and sizes. Strides may differ, so strided tensors are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import ReduceOp

_OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_NUMBERS = _FLOATS | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_MOVABLE = _NUMBERS | {torch.bool, torch.complex64, torch.complex128}


def options_of(kind: type, given: Sequence[object], named: Mapping[str, object]) -> Any:
    """Torch's options of a call, or their defaults; None for another overload.

    Args:
        kind: class of the options.
        given: arguments after the tensors; another overload is `group.allreduce(tensor, op, time)`.
        named: keyword arguments.
    """
    options = [*given, *named.values()]
    if not options:
        return kind()
    return options[0] if len(options) == 1 and isinstance(options[0], kind) else None


def are_lists(*given: object) -> bool:
    """Whether tensors come in lists, as torch's functions pass them.

    `group.allreduce(tensor)` is another overload, which is left to gloo.
    """
    return all(isinstance(each, list | tuple) for each in given)


def op_of(options: Any, tensors: Sequence[Tensor]) -> ReduceOp | None:
    """The operation that combines `tensors`; None: gloo does it, or raises the error.

    A mean is a sum, divided by the caller. None, too, without options.
    """
    if options is None:
        return None
    chosen = options.reduceOp
    kinds = _FLOATS if chosen == dist.ReduceOp.AVG else _NUMBERS
    return _OPS.get(chosen.op) if _all_plain(tensors, kinds) else None


def can_copy(tensors: Sequence[Tensor]) -> bool:
    """Whether shared memory can move the tensors."""
    return _all_plain(tensors, _MOVABLE)


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all have one size and dtype; uneven lists are left to gloo."""
    first = tensors[0]
    return all(t.numel() == first.numel() and t.dtype == first.dtype for t in tensors)


def are_parts(parts: Sequence[Tensor], wholes: Sequence[Tensor], world_size: int) -> bool:
    """Whether the sizes and dtypes of `parts` and `wholes` match; else gloo says why not.

    Args:
        parts: each [n].
        wholes: as many, each [world_size * n].
        world_size: number of ranks.
    """
    return len(wholes) == len(parts) and all(
        whole.numel() == world_size * part.numel() and whole.dtype == part.dtype
        for whole, part in zip(wholes, parts, strict=True)
    )


def _all_plain(tensors: Sequence[Tensor], dtypes: set[torch.dtype]) -> bool:
    """Whether all are dense CPU tensors of `dtypes`; subclasses need torch's own operations."""
    return bool(tensors) and all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in dtypes
        for tensor in tensors
    )
