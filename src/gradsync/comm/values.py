"""Small values between ranks, as JSON over uint8 tensors (never pickle), and the check that all
ranks make the same call.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from gradsync import errors
from gradsync.comm.base import Communicator
from gradsync.errors import GradsyncError, RunError


def broadcast_json(comm: Communicator, value: Any = None) -> Any:
    """Rank 0's `value` (anything JSON can write) on every rank. Two broadcasts: int64 [1] with the
    length, uint8 [length] with the text. For start-up and shutdown, not for the step."""
    if comm.world_size == 1:
        return value
    payload = json.dumps(value).encode() if comm.rank == 0 else b""
    size = torch.tensor([len(payload)], dtype=torch.int64)
    comm.broadcast(size).wait()
    data = torch.zeros(int(size.item()), dtype=torch.uint8)
    if comm.rank == 0:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    comm.broadcast(data).wait()
    return json.loads(bytes(data.tolist()))


def from_rank_0(comm: Communicator, make: Callable[[], Any]) -> Any:
    """What `make()` returns on rank 0, on every rank, by `broadcast_json`. A gradsync error that it
    raises there is raised on all ranks."""
    made: Any = None
    if comm.rank == 0:
        try:
            made = {"value": make()}
        except GradsyncError as error:
            broadcast_json(comm, {"error": type(error).__name__, "words": str(error)})
            raise
    made = broadcast_json(comm, made)
    if "error" in made:
        raise getattr(errors, made["error"], RunError)(made["words"])
    return made["value"]


def all_gather_numbers(comm: Communicator, number: int) -> list[int]:
    """Every rank's `number` (64 bits, signed), in rank order: one all-gather, int64 [1]."""
    gathered = torch.zeros(comm.world_size, dtype=torch.int64)
    comm.all_gather(gathered, torch.tensor([number], dtype=torch.int64)).wait()
    return gathered.tolist()


def all_gather_json(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's `value` (anything JSON can write), in rank order. Two all-gathers: int64 [1]
    with the length, uint8 [longest] with the text. Not for the step."""
    payload = json.dumps(value).encode()
    sizes = all_gather_numbers(comm, len(payload))
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    gathered = torch.zeros(comm.world_size * max(sizes), dtype=torch.uint8)
    comm.all_gather(gathered, mine).wait()
    rows = gathered.view(comm.world_size, -1).numpy()
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def all_sum(comm: Communicator, *numbers: float) -> tuple[float, ...]:
    """The sums of a few numbers over all ranks, in float64 (one all-reduce, float64 [n])."""
    data = torch.tensor(numbers, dtype=torch.float64)
    comm.all_reduce(data).wait()
    return tuple(data.tolist())


def broadcast_tensors(
    comm: Communicator, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Copy rank 0's named CPU tensors to every rank: names, shapes and dtypes first
    (`broadcast_json`), then one broadcast per tensor."""
    if comm.world_size == 1:
        return dict(tensors or {})
    described = [
        [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in (tensors or {}).items()
    ]
    received: dict[str, Tensor] = {}
    for name, shape, dtype in broadcast_json(comm, described):
        if comm.rank == 0 and tensors is not None:
            # A lazy conjugation or negation is not part of the bytes, so resolve it first.
            tensor = tensors[name].resolve_conj().resolve_neg().contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        # A uint8 view of the whole tensor: every dtype can be sent, bits unchanged.
        comm.broadcast(tensor.reshape(-1).view(torch.uint8)).wait()
        received[name] = tensor
    return received


def same_on_all_ranks(comm: Communicator, data: bytes) -> bool:
    """Whether all ranks hold equal `data`: one all-reduce of a digest of 63 bits, int64 [2]."""
    return same_number(comm, int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 1)


def same_number(comm: Communicator, number: int) -> bool:
    """Whether all ranks hold the same `number` (64 bits, signed): one all-reduce, int64 [2]."""
    both = torch.tensor([number, -number])  # equal numbers have equal minima and maxima
    comm.all_reduce(both, "max").wait()
    return both.tolist() == [number, -number]


def check_same_call(comm: Communicator, what: str, tensor: Tensor, where: str = "") -> None:
    """Check that all ranks do `what` (operation and options) with tensors of one shape, dtype and
    kind of device at one place (from `call_site` or by name); RunError on all ranks if not.

    Backends sum whatever arrives: tensors in another order, float32 with int32. Whole group, int64
    [2], on the CPU, blocking; two all-gathers of text when they differ.
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
    calls = "; ".join(f"rank {', '.join(some)}: {call}" for call, some in ranks.items())
    raise RunError(f"ranks call different operations at the same time: {calls} ({hint})")


def call_site() -> str:
    """File, line and function that called gradsync; equal on hosts with the file in different
    folders."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "gradsync":
        frame = frame.f_back
    code = frame.f_code
    return f"at {PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"
