"""Checks of a model before it is replicated, and the broadcast of rank 0's values.

Ranks that hold different shapes, or the same shapes in another order, would hang in the first
broadcast or exchange bytes of unrelated parameters. So the ranks compare one digest. Only if
digests differ do they exchange the lists, to report the difference.

A model that torch or another library already synchronises is refused: every gradient would be
communicated twice, with a result that depends on the order of hooks. With unequal numbers of
leaves, ranks would wait for each other indefinitely.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

IN_DDP = (
    "torch's DistributedDataParallel synchronises this model already (Accelerate, Fabric and "
    "transformers' Trainer wrap models in it): train the plain model that gs.replicate was given, "
    "or keep the wrapper without gs.replicate, with gs.comm_hook(...) for our reductions"
)
_IN_FSDP = (
    "torch's FSDP has sharded this model already and synchronises it: give gs.replicate the plain "
    "model, with strategy='fsdp'"
)
_ADVICE = {
    "DistributedDataParallel": IN_DDP,
    "DDP": IN_DDP,  # torch.distributed._composable.replicate
    "FullyShardedDataParallel": _IN_FSDP,
    "FSDPModule": _IN_FSDP,  # fully_shard
    "DeepSpeedEngine": "DeepSpeed synchronises this model already: give gs.replicate the plain one",
}
"""What to do about a class that synchronises its module. Classes are compared by name, because
importing FSDP to check costs too much."""


def refuse_synchronised(model: nn.Module) -> None:
    """Raise ConfigError if another mechanism synchronises `model` or a part of it."""
    for part in model.modules():
        for kind in type(part).__mro__:
            ours = kind.__module__.startswith(("torch.", "deepspeed."))
            if ours and kind.__name__ in _ADVICE:
                raise ConfigError(_ADVICE[kind.__name__])


def check_same_model(
    model: nn.Module, comm: Communicator, settings: Mapping[str, str | None] | None = None
) -> None:
    """Check that names, shapes, dtypes, trainability, ties and kinds of device are equal.

    One all-reduce, int64 [2]; two all-gathers (`all_gather_json`) if something differs. It never
    hangs, however different the ranks' models are. `settings` are arguments that must be equal too,
    such as `{"sync": "bucketed"}`.

    Raises:
        ConfigError: on every rank, names the first difference and the ranks on each side; or a
            parameter without values (lazy modules, the meta device) or in shared memory.
    """
    texts = {name: repr(value) for name, value in (settings or {}).items()} | describe_model(model)
    if not same_on_all_ranks(comm, json.dumps(texts).encode()):
        raise ConfigError(
            f"ranks do not start alike: {first_difference(comm, texts)}; run the same script with "
            "the same arguments on every rank"
        )
    for name, tensor in _tensors(model):
        if is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(
                f"{name} has no values yet: run a forward first (lazy modules) or "
                "model.to_empty(device=...) (the meta device), then replicate"
            )
        if comm.world_size > 1 and tensor.is_cpu and tensor.is_shared():
            raise ConfigError(
                f"{name} lies in memory that processes share (mp.spawn and share_memory() do that "
                "to a model): each rank's step would change it for all. Build the model in each "
                "process, or replicate a copy of it: copy.deepcopy(model)"
            )


def describe_model(model: nn.Module) -> dict[str, str]:
    """A text for each parameter, then for each buffer; tied ones appear under each name."""
    first_names: dict[int, str] = {}
    texts: dict[str, str] = {}
    for name, tensor in _tensors(model):
        first = first_names.setdefault(id(tensor), name)
        shape = "of unknown shape" if is_lazy(tensor) else list(tensor.shape)
        kind = "trainable" if tensor.requires_grad else "frozen"
        # No index of the device: each rank has its own GPU.
        texts[name] = f"{shape} {tensor.dtype} {kind} on {tensor.device.type}"
        texts[name] += "" if first == name else f" tied to {first}"
    return texts


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by the names used in messages, unique among both."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return [(f"parameter {name!r}", tensor) for name, tensor in parameters] + [
        (f"buffer {name!r}", tensor) for name, tensor in buffers
    ]


def first_difference(comm: Communicator, texts: Mapping[str, str]) -> str:
    """A line with the first of the `texts` that differs between ranks, and each rank's; "" if they
    are equal, in the same order. Two all-gathers (`all_gather_json`)."""
    by_rank: list[dict[str, str]] = all_gather_json(comm, texts)
    for name in dict.fromkeys(name for known in by_rank for name in known):
        if said := _sides([known.get(name, "nothing") for known in by_rank]):
            return f"{name} differs: {said}"
    for number, names in enumerate(zip(*by_rank, strict=True)):
        if said := _sides(names):
            return f"number {number + 1} of the list differs: {said}"
    return ""


def _sides(texts: Sequence[str]) -> str:
    """The ranks that have each of the `texts`, one per rank; "" if all are equal."""
    sides = group_ranks(texts).items()
    shown = ", ".join(f"{name_ranks(ranks)} {text}" for text, ranks in sides)
    return shown if len(sides) > 1 else ""


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0,2" or, with three or more in a row, "ranks 0-6,9"; ascending."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(str(rank) for rank in run)
        for run in runs
    ]
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(parts)}"


def group_ranks(values: Sequence[Hashable]) -> dict[Any, list[int]]:
    """Ranks grouped by value, given one value per rank; in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def broadcast_model(model: nn.Module, comm: Communicator) -> None:
    """Overwrite every rank's parameters and buffers with rank 0's; tied tensors are sent once.

    One asynchronous broadcast per tensor over the whole group, as bytes (so every dtype is sent
    with its bits, NaN payloads too); waits for all at the end. Call `check_same_model` first.
    """
    under_way: list[tuple[Callable[[], None], Tensor, Tensor]] = []
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach()
        if values.numel():
            message = values.contiguous()  # the buffer itself, if contiguous
            work = comm.broadcast(message.reshape(-1).view(torch.uint8))
            under_way.append((work.wait, values, message))
    for wait, values, message in under_way:
        wait()
        if message.data_ptr() == values.data_ptr():
            continue
        target, source = values, message
        for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
            if size > 1 and stride == 0:  # an expanded dimension occupies one place in memory
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        target.copy_(source)
