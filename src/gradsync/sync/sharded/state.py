"""Optimizer state: from the shards to whole tensors, and back.

Tensors of a piece's shape are sent as flat shards, one all-gather per bucket and name. Single
numbers (`step`) are equal in all pieces of a parameter and are sent in a short text beforehand,
which also lists the state of each rank: a parameter that has never had a gradient has no state
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.errors import ConfigError
from gradsync.sync.sharded.bucket import ShardedBucket

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, Any]
"""Optimizer state of one parameter, by name."""


def gather_state(
    buckets: Sequence[ShardedBucket], comm: Communicator
) -> list[tuple[Tensor, State]]:
    """Gather the whole state of every parameter that has one, on every rank; all ranks call it.

    Raises:
        ConfigError: names state that is neither elementwise nor a single number.
    """
    found: list[tuple[Tensor, State]] = []
    parts = all_gather_json(comm, [_describe(bucket) for bucket in buckets])
    for number, bucket in enumerate(buckets):
        described: dict[str, State] = {}
        for part in parts:
            described |= part[number]
        whole = {int(index): _small(bucket, entry) for index, entry in described.items()}
        slots: dict[str, str] = {}
        for entry in described.values():
            slots |= {name: kind["elements"] for name, kind in entry.items() if "elements" in kind}
        for name, dtype in sorted(slots.items()):
            flat = _gather_slot(bucket, name, getattr(torch, dtype))
            for slot in bucket.plan.slots:
                if "elements" in described.get(str(slot.index), {}).get(name, ()):
                    values = flat[slot.offset : slot.offset + slot.numel].clone()
                    shape = bucket.parameters[slot.index].shape
                    whole[slot.index][name] = values.view(shape)
        found += [(bucket.parameters[index], state) for index, state in sorted(whole.items())]
    return found


def take_state(buckets: Sequence[ShardedBucket], whole: Mapping[Tensor, State]) -> None:
    """Keep this rank's pieces of whole state; the buckets' previous state is dropped.

    Raises:
        ConfigError: a tensor that has neither its parameter's shape nor one element.
    """
    for bucket in buckets:
        if bucket.inner is None:
            continue
        bucket.inner.state.clear()
        for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
            parameter = bucket.parameters[piece.index]
            if state := whole.get(parameter):
                bucket.inner.state[tensor] = {
                    name: _part(name, value, parameter, piece.start, piece.stop)
                    for name, value in state.items()
                }


def _part(name: str, value: Any, parameter: Tensor, start: int, stop: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape:
        return value.detach().reshape(-1)[start:stop].to(parameter.device, copy=True)
    if value.dim() == 0:
        return value.detach().clone()
    raise not_elementwise(name, value.shape, parameter.shape)


def _describe(bucket: ShardedBucket) -> dict[str, State]:
    """Description for JSON: parameter index -> name -> kind of state, numbers included."""
    if bucket.inner is None:
        return {}
    described: dict[str, State] = {}
    for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
        entry: State = {}
        for name, value in bucket.inner.state.get(tensor, {}).items():
            if not isinstance(value, torch.Tensor):
                entry[name] = {"value": value}
            elif value.shape == tensor.shape:
                entry[name] = {"elements": _name(value.dtype)}
            elif value.dim() == 0:
                on_cpu = value.device.type == "cpu"
                entry[name] = {"number": value.item(), "dtype": _name(value.dtype), "cpu": on_cpu}
            else:
                raise not_elementwise(name, value.shape, tensor.shape)
        if entry:
            described[str(piece.index)] = entry
    return described


def _small(bucket: ShardedBucket, entry: State) -> State:
    """The state of one parameter; its tensors with elements are filled in later."""
    state: State = {}
    device = bucket.parameters[0].device
    for name, kind in entry.items():
        if "number" in kind:
            state[name] = torch.tensor(
                kind["number"],
                dtype=getattr(torch, kind["dtype"]),
                device="cpu" if kind["cpu"] else device,
            )
        else:
            state[name] = kind.get("value")
    return state


def _gather_slot(bucket: ShardedBucket, name: str, dtype: torch.dtype) -> Tensor:
    shard = bucket.empty(shard=True, dtype=dtype)
    if bucket.inner is not None:
        for piece, tensor in zip(bucket.pieces, bucket.tensors, strict=True):
            value = bucket.inner.state.get(tensor, {}).get(name)
            if isinstance(value, torch.Tensor):
                shard[piece.offset : piece.offset + piece.numel] = value
    flat, work = bucket.gather(shard)
    work.wait()
    return flat


def not_elementwise(name: str, got: torch.Size, shape: torch.Size) -> ConfigError:
    """Make the error for state that cannot be divided among ranks.

    Args:
        name: of the state.
        got: its shape.
        shape: of its parameter.
    """
    return ConfigError(
        f"optimizer state {name!r} has shape {tuple(got)} for a parameter of shape {tuple(shape)}: "
        "neither elementwise nor a single number; this optimizer cannot be sharded"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
