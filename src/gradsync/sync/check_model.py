"""Check that all ranks build the same model, before rank 0's values are broadcast.

Ranks that hold different shapes, or the same ones in another order, would hang in the first
broadcast or exchange bytes between parameters that do not belong together. So the ranks compare one
digest; only when digests differ do they exchange the lists, to report the difference.

Refusal of models that torch or another library synchronises already.

Two mechanisms on one model communicate every gradient twice. The result depends on the order of
hooks: in the user's training loop under `invariant` the gradient is no mean any more, and with
unequal numbers of leaves ranks wait for each other for ever. So it is refused, by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

_WHAT_TO_DO = "run the same script with the same arguments on every rank"


class Entry(NamedTuple):
    """Compared properties of a parameter, buffer or setting; plain values that JSON can write."""

    kind: str
    """"parameter", "buffer" or "setting"."""
    name: str
    shape: list[int] | None
    """None: not known yet (a lazy module's)."""
    dtype: str
    trainable: bool
    tied_to: str
    """The earlier name of the same tensor; "" when this is the first."""
    device: str
    """Its type, such as "cpu", without the index: each rank has its own GPU."""

    @property
    def key(self) -> str:
        """Name in messages; unique among all entries."""
        return self.name if self.kind == "setting" else f"{self.kind} {self.name!r}"


def check_same_model(
    model: nn.Module, comm: Communicator, settings: Mapping[str, str | None] | None = None
) -> None:
    """Check that names, shapes, dtypes, trainability, ties and kinds of device are equal.

    One all-reduce, int64 [2]; two all-gathers (`all_gather_json`) when something differs. However
    different the ranks' models are, it never hangs.

    Args:
        model: on its device already.
        comm: the ranks that compare.
        settings: arguments that must be equal too, such as `{"sync": "bucketed"}`.

    Raises:
        ConfigError: on every rank, names the first difference and the ranks on each side; or a
            parameter without values (lazy modules, the meta device).
    """
    entries = [
        Entry("setting", name, [], repr(value), False, "", "")
        for name, value in (settings or {}).items()
    ]
    entries += describe_model(model)
    if not same_on_all_ranks(comm, json.dumps(entries).encode()):
        by_rank = [[Entry(*entry) for entry in rank] for rank in all_gather_json(comm, entries)]
        raise ConfigError(f"ranks do not start alike: {first_difference(by_rank)}; {_WHAT_TO_DO}")
    for entry in entries:
        if entry.shape is None or entry.device == "meta":
            raise ConfigError(
                f"{entry.key} has no values yet: run a forward first (lazy modules) or "
                "model.to_empty(device=...) (the meta device), then replicate"
            )


def describe_model(model: nn.Module) -> list[Entry]:
    """All parameters, then all buffers, tied ones under each of their names."""
    from torch.nn.parameter import is_lazy

    entries: list[Entry] = []
    first_names: dict[int, str] = {}
    named: Iterable[tuple[str, Iterable[tuple[str, Tensor]]]] = (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    )
    for kind, tensors in named:
        for name, tensor in tensors:
            first = first_names.setdefault(id(tensor), name)
            entries.append(
                Entry(
                    kind=kind,
                    name=name,
                    shape=None if is_lazy(tensor) else list(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    trainable=tensor.requires_grad,
                    tied_to="" if first == name else first,
                    device=tensor.device.type,
                )
            )
    return entries


def first_difference(by_rank: Sequence[Sequence[Entry]]) -> str:
    """The first difference between the ranks' lists, as half a sentence.

    Args:
        by_rank: each rank's entries; at least two differ.
    """
    known = [{entry.key: entry for entry in entries} for entries in by_rank]
    for position, row in enumerate(zip_longest(*by_rank)):
        keys = [entry.key if entry else None for entry in row]
        for key in dict.fromkeys(key for key in keys if key is not None):
            if any(key not in entries for entries in known):
                return f"{key} {_sides([_have(entries.get(key)) for entries in known])}"
        if len(set(keys)) > 1:
            return f"number {position + 1} of the list is {_sides([str(key) for key in keys])}"
        if len({json.dumps(entry) for entry in row}) > 1:
            return f"{keys[0]} is {_sides(_differing(row))}"
    raise AssertionError("the lists are equal")


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
    """Ranks by value, given one value per rank; in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def broadcast_model(model: nn.Module, comm: Communicator) -> None:
    """Overwrite every rank's parameters and buffers with rank 0's; tied tensors are sent once.

    One asynchronous broadcast per tensor over the whole group, as bytes (so every dtype is sent
    with its bits, NaN payloads too), all waited for at the end. `check_same_model` comes first.
    """

    under_way: list[Callable[[], None]] = []
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach()
        if values.numel() == 0:
            continue
        message = values.contiguous()  # itself, where it is contiguous
        work = comm.broadcast(message.reshape(-1).view(torch.uint8))
        under_way.append(_arrival(work.wait, values, message))
    for arrive in under_way:
        arrive()


def _arrival(wait: Callable[[], None], values: Tensor, message: Tensor) -> Callable[[], None]:
    """Wait for `message`, then copy it to `values`, unless they share memory."""

    def arrive() -> None:
        wait()
        if message.data_ptr() == values.data_ptr():
            return
        target, source = values, message
        for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
            if size > 1 and stride == 0:  # an expanded dimension: one place in memory
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        target.copy_(source)

    return arrive


def _have(entry: Entry | None) -> str:
    return "exists" if entry else "is missing"


def _sides(texts: Sequence[str]) -> str:
    """The groups of ranks with one text each: `A on ranks 0,2 but B on rank 1`."""
    groups = group_ranks(texts)
    return " but ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in groups.items())


def _differing(row: Sequence[Entry]) -> list[str]:
    """Description of each rank's entry: shape and dtype, and every other property that differs."""

    def differs(values: list[Any]) -> bool:
        return any(value != values[0] for value in values)

    texts = []
    for entry in row:
        shape = "of unknown shape" if entry.shape is None else str(entry.shape)
        words = [entry.dtype] if entry.kind == "setting" else [shape, entry.dtype]
        if differs([other.trainable for other in row]):
            words.append("trainable" if entry.trainable else "frozen")
        if differs([other.tied_to for other in row]):
            words.append(f"tied to {entry.tied_to!r}" if entry.tied_to else "not tied")
        if differs([other.device for other in row]):
            words.append(f"(device {entry.device})")
        texts.append(" ".join(words))
    return texts


log = logging.getLogger("gradsync")


ADVICE = {
    "DistributedDataParallel": (
        "torch's DistributedDataParallel synchronises this model already (Accelerate, Fabric and "
        "transformers' Trainer wrap models in it): train the plain model that gs.replicate was "
        "given, or keep the wrapper without gs.replicate, with gs.comm_hook(...) for our reductions"
    ),
    "FullyShardedDataParallel": (
        "torch's FSDP has sharded this model already and synchronises it: give gs.replicate the "
        "plain model, with sync='fsdp'"
    ),
    "DeepSpeedEngine": "DeepSpeed synchronises this model already: give gs.replicate the plain one",
}


_KINDS = {
    "DDP": "DistributedDataParallel",  # of torch.distributed._composable.replicate
    "FSDPModule": "FullyShardedDataParallel",  # of fully_shard
} | {name: name for name in ADVICE}


def refuse_synchronised(model: nn.Module) -> None:
    """Check classes by name before `model` is replicated: importing FSDP to check costs too much.

    Raises:
        ConfigError: another mechanism synchronises it, or a part of it.
    """
    for part in model.modules():
        known = ("torch.", "deepspeed.")
        classes = [c for c in type(part).__mro__ if c.__module__.startswith(known)]
        names = {each.__name__ for each in classes}
        if found := names & _KINDS.keys():
            raise ConfigError(ADVICE[_KINDS[found.pop()]])
        if "DataParallel" in names:
            log.warning(
                "torch's DataParallel splits each leaf over all GPUs that this process sees, which "
                "other ranks of this host use too: give gs.replicate the plain model, and start "
                "one rank for each GPU"
            )
