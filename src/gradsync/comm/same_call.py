"""Refusal, on all ranks, of a collective that they call with different arguments.

Backends add up whatever arrives: tensors in another order, float32 to int32. Through shared memory
ranks see each other's calls at no cost; elsewhere they compare them before the tensor is sent.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.errors import RunError

_MOST_CALLS = 4
"""Number of different calls that a message lists."""


def check_same_call(comm: Communicator, what: str, tensor: Tensor, where: str = "") -> None:
    """Check that all ranks do `what` with equal tensors at one place; sends nothing on one rank.

    Whole group, int64 [2], on the CPU, blocking; two all-gathers of text when they differ.

    Args:
        comm: the ranks.
        what: operation and options.
        tensor: shape, dtype and kind of device must be equal.
        where: the call, from `call_site` or by name; "" compares the rest alone.

    Raises:
        RunError: on all ranks, with the call of each of them.
    """
    if comm.world_size == 1:
        return
    dtype = str(tensor.dtype).removeprefix("torch.")
    what = f"{what} of {dtype} {list(tensor.shape)} on {tensor.device.type}"
    if same_on_all_ranks(comm, f"{what} {where}".encode()):
        return
    told = [(what, where) for what, where in all_gather_json(comm, [what, where])]
    hint = "all ranks must bring one shape and dtype, with one op, in one order"
    if len({what for what, _ in told}) == 1:
        hint = (
            "call them in one order on all ranks; if it is one reduction that ranks call from "
            "different lines, give it one name= there"
        )
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(told):
        ranks.setdefault(" ".join(call).strip(), []).append(str(rank))
    calls = [f"rank {', '.join(some)}: {call}" for call, some in ranks.items()]
    rest = f"; and {len(calls) - _MOST_CALLS} more" if len(calls) > _MOST_CALLS else ""
    raise RunError(
        f"ranks call different operations at the same time: {'; '.join(calls[:_MOST_CALLS])}{rest} "
        f"({hint})"
    )


def call_site() -> str:
    """File, line and function that called gradsync; equal on hosts with the file in different
    folders."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "gradsync":
        frame = frame.f_back
    code = frame.f_code
    return f"at {PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"
