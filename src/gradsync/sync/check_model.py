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
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


log = logging.getLogger("gradsync")

Entry = Sequence[str]
"""A parameter, buffer or setting: its name, then its properties, both as messages show them. The
first property is always shown, another one only if ranks differ in it."""

ADVICE = {
    "DistributedDataParallel": (
        "torch's DistributedDataParallel synchronises this model already (Accelerate, Fabric and "
        "transformers' Trainer wrap models in it): train the plain model that gs.replicate was "
        "given, or keep the wrapper without gs.replicate, with gs.comm_hook(...) for our reductions"
    ),
    "FullyShardedDataParallel": (
        "torch's FSDP has sharded this model already and synchronises it: give gs.replicate the "
        "plain model, with strategy='fsdp'"
    ),
    "DeepSpeedEngine": "DeepSpeed synchronises this model already: give gs.replicate the plain one",
}
_KINDS = {
    "DDP": "DistributedDataParallel",  # of torch.distributed._composable.replicate
    "FSDPModule": "FullyShardedDataParallel",  # of fully_shard
} | {name: name for name in ADVICE}


def refuse_synchronised(model: nn.Module) -> None:
    """Raise ConfigError if another mechanism synchronises `model` or a part of it.

    Compares classes by name, because importing FSDP to check costs too much.
    """
    for part in model.modules():
        known = ("torch.", "deepspeed.")
        names = {c.__name__ for c in type(part).__mro__ if c.__module__.startswith(known)}
        if found := names & _KINDS.keys():
            raise ConfigError(ADVICE[_KINDS[found.pop()]])
        if "DataParallel" in names:
            log.warning(
                "torch's DataParallel splits each micro-batch over all GPUs that this process "
                "sees, which other ranks of this host use too: give gs.replicate the plain model, "
                "and start one rank for each GPU"
            )


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
    entries: list[Entry] = [(name, repr(value)) for name, value in (settings or {}).items()]
    entries += describe_model(model)
    if not same_on_all_ranks(comm, json.dumps(entries).encode()):
        raise ConfigError(
            f"ranks do not start alike: {first_difference(all_gather_json(comm, entries))}; run "
            "the same script with the same arguments on every rank"
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


def describe_model(model: nn.Module) -> list[Entry]:
    """Entries of all parameters, then of all buffers; tied ones appear under each name."""
    first_names: dict[int, str] = {}
    entries: list[Entry] = []
    for key, tensor in _tensors(model):
        first = first_names.setdefault(id(tensor), key)
        shape = "of unknown shape" if is_lazy(tensor) else list(tensor.shape)
        entries.append(
            (
                key,
                f"{shape} {str(tensor.dtype).removeprefix('torch.')}",
                "trainable" if tensor.requires_grad else "frozen",
                "not tied" if first == key else f"tied to {first}",
                f"(device {tensor.device.type})",  # no index: each rank has its own GPU
            )
        )
    return entries


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by the names used in messages, unique among both."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return [(f"parameter {name!r}", tensor) for name, tensor in parameters] + [
        (f"buffer {name!r}", tensor) for name, tensor in buffers
    ]


def first_difference(by_rank: Sequence[Sequence[Entry]]) -> str:
    """The first difference between the ranks' lists, as half a sentence. At least two lists must
    differ."""
    known = [{key for key, *_ in entries} for entries in by_rank]
    for position, row in enumerate(zip_longest(*by_rank)):
        keys = [entry[0] if entry else None for entry in row]
        for key in dict.fromkeys(key for key in keys if key is not None):
            if not all(key in names for names in known):
                return f"{key} {_sides(['exists' if key in k else 'is missing' for k in known])}"
        if len(set(keys)) > 1:
            return f"number {position + 1} of the list is {_sides([str(key) for key in keys])}"
        first, *others = zip(*(entry[1:] for entry in row), strict=True)  # properties by rank
        shown = [first, *(texts for texts in others if len(set(texts)) > 1)]
        if len(shown) > 1 or len(set(first)) > 1:
            return f"{keys[0]} is {_sides([' '.join(words) for words in zip(*shown, strict=True)])}"
    raise AssertionError("the lists are equal")


def _sides(texts: Sequence[str]) -> str:
    """The groups of ranks that share a text: `A on ranks 0,2 but B on rank 1`."""
    return " but ".join(f"{text} on {name_ranks(r)}" for text, r in group_ranks(texts).items())


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
