"""Checks that ranks hold the same model, before it is replicated and later, and rank 0's broadcast.

Ranks that hold different shapes, or the same shapes in another order, would hang in the first
broadcast or exchange bytes of unrelated parameters. So the ranks compare one digest. Only if
digests differ do they exchange the lists, to report the difference.

A model that torch or another library already synchronises is refused: every gradient would be
communicated twice, with a result that depends on the order of hooks. With unequal numbers of
micro-batches, ranks would wait for each other indefinitely.

[Note: Replica hash] A tensor's bits are read as integers x_0 .. x_{n-1} of 1, 2 or 4 bytes; longer
elements count as several. The hash is the pair (sum of x_i, sum of (i + 1) x_i), both modulo 2**64.
One flipped bit changes the first sum by a power of two below 2**32, never by a multiple of 2**64.
Swapping two unequal integers changes the second sum by (x_i - x_j)(j - i), which is nonzero for
n < 2**31. Bits are compared, not numbers: 0.0 and -0.0 differ, and so do NaNs with other payloads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.errors import ConfigError, DriftError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

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
        if comm.world_size > 1 and tensor.is_cpu and not is_lazy(tensor) and tensor.is_shared():
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
    if any(values.is_cuda for _, values, _ in under_way):
        torch.cuda.synchronize()
        comm.barrier()  # a rank that is lost from here on leaves no other without rank 0's weights


_PIECE = 1 << 17
"""Number of integers widened to 64 bits at a time: 1 MiB stays in the cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Dtype used to read elements of 1 or 2 bytes; longer ones are read as int32."""


def check_replicas(
    tensors: Iterable[tuple[str, Tensor]],
    comm: Communicator,
    *,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    edited: Sequence[int] = (),
) -> None:
    """Check that all ranks hold the same bits in the same named tensors.

    About 2 ns per element on a CPU core. One all-gather, int64 [1], of a digest over all hashes
    ([Note: Replica hash]); two more (`all_gather_json`) only if digests differ, so a difference
    never makes it hang. Waits for the device once.

    Args:
        tensors: such as `replica_tensors(model, [optimizer])`.
        comm: the ranks that hold replicas.
        step: for the message.
        ranks: names of the ranks of `comm` in messages, unless `comm` is the whole run.
        edited: ranks known to have changed their tensors.

    Raises:
        DriftError: on every rank, names the first tensor that differs and the ranks in the
            minority; without a majority (always so on two ranks) it names both sides.
    """
    found = {name: hash_bits(tensor) for name, tensor in tensors}
    table = torch.stack(list(found.values())).cpu().tolist() if found else []  # one wait
    mine: dict[str, list[int]] = dict(zip(found, table, strict=True))
    if not same_on_all_ranks(comm, repr(mine).encode()):
        by_rank = all_gather_json(comm, mine)
        error = DriftError(_difference(by_rank, step, ranks, edited))
        error.sides = group_ranks([repr(hashes) for hashes in by_rank]).values()
        raise error


def hash_bits(tensor: Tensor) -> Tensor:
    """The hash of [Note: Replica hash], int64 [2], on the tensor's device."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    places = torch.arange(1, min(_PIECE, len(bits)) + 1, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].long()
        plain = piece.sum()
        weighted = piece.mul_(places[: len(piece)]).sum() + start * plain
        total += torch.stack([plain, weighted])
    return total


def replica_tensors(
    model: nn.Module, optimizers: Sequence[Optimizer] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and the state of `optimizers` (not of sharded ones), with names."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for optimizer in optimizers:
        for name, parameter in model.named_parameters():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value


def _difference(
    by_rank: list[dict[str, list[int]]],
    step: int | None,
    ranks: Sequence[int] | None,
    edited: Sequence[int],
) -> str:
    """Message about the ranks' hashes by tensor; other arguments as for `check_replicas`."""
    names = list(dict.fromkeys(name for hashes in by_rank for name in hashes))
    sides_of = {
        name: list(group_ranks([tuple(hashes.get(name, ())) for hashes in by_rank]).values())
        for name in names
    }
    differing = [name for name, sides in sides_of.items() if len(sides) > 1]
    when = "" if step is None else f" after step {step}"
    if not differing:
        return f"replicas differ{when}: ranks list their tensors in another order"
    share = f"{len(differing)} of {len(names)} tensors"
    where = f"replicas differ{when}, first in {differing[0]!r} ({share})"
    if edited:
        return (
            f"{where}: since the last step (or gs.replicate) weights were changed on "
            f"{name_ranks(edited)}, not by the optimizer; load checkpoints, and edit weights, on "
            "all ranks alike. A forward that changes them, as max_norm of an Embedding does, "
            "changes other rows on each rank: do it after the step"
        )
    known = range(len(by_rank)) if ranks is None else ranks
    sides = [[known[index] for index in side] for side in sides_of[differing[0]]]
    largest = max(sides, key=len)
    if 2 * len(largest) > len(by_rank):
        odd = sorted(rank for side in sides if side is not largest for rank in side)
        verb = "holds" if len(odd) == 1 else "hold"
        verdict = f"{name_ranks(odd)} {verb} other bits than {name_ranks(largest)}"
    else:
        parts = " / ".join(name_ranks(side) for side in sorted(sides))
        verdict = (
            f"{parts} hold different bits, and without a majority it cannot be said which is right"
        )
    return f"{where}: {verdict}; go back to a checkpoint from before"
