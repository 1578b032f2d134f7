"""What shared memory takes; everything else is gloo's.

[Note: One choice on all ranks] Whether an operation goes through shared memory must be decided
alike on all ranks, from what torch wants to be equal on them: which operation, how many tensors,
their dtypes and sizes. Not from strides, which may differ; so strided tensors are copied instead.
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
    """Torch's options of a call: its only other argument, or their defaults.

    None for other ways to call a method, such as `group.allreduce(tensor, op, timeout)`.
    """
    options = [*given, *named.values()]
    if not options:
        return kind()
    return options[0] if len(options) == 1 and isinstance(options[0], kind) else None


def are_lists(*given: object) -> bool:
    """Whether tensors come in lists, as torch's functions hand them over.

    `group.allreduce(tensor)` is another way to call a method; gloo's take it too.
    """
    return all(isinstance(each, list | tuple) for each in given)


def op_of(options: Any, tensors: Sequence[Tensor]) -> ReduceOp | None:
    """How to combine `tensors`; None: gloo does, or words the error.

    A mean is a sum, divided by the caller. Without options there is nothing to combine.
    """
    if options is None:
        return None
    chosen = options.reduceOp
    kinds = _FLOATS if chosen == dist.ReduceOp.AVG else _NUMBERS
    return _OPS.get(chosen.op) if _all_plain(tensors, kinds) else None


def can_copy(tensors: Sequence[Tensor]) -> bool:
    """Whether shared memory moves them."""
    return _all_plain(tensors, _MOVABLE)


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all have one size and dtype; uneven lists are gloo's."""
    first = tensors[0]
    return all(t.numel() == first.numel() and t.dtype == first.dtype for t in tensors)


def are_parts(parts: Sequence[Tensor], wholes: Sequence[Tensor], world_size: int) -> bool:
    """Whether each of `wholes` has a place for every rank's part; else gloo words the error."""
    return len(wholes) == len(parts) and all(
        whole.numel() == world_size * part.numel() and whole.dtype == part.dtype
        for whole, part in zip(wholes, parts, strict=True)
    )


def _all_plain(tensors: Sequence[Tensor], dtypes: set[torch.dtype]) -> bool:
    """Subclasses (of a tracer, say) want to see torch's own operations."""
    return bool(tensors) and all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in dtypes
        for tensor in tensors
    )
