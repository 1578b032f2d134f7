"""Detects replicas that differ, by comparing all bits.

[Note: Replica hash] A tensor's bits are read as integers x_0 .. x_{n-1} of 1, 2 or 4 bytes; longer
elements count as several. The hash is the pair (sum of x_i, sum of (i + 1) x_i), both modulo 2**64.
One flipped bit changes the first sum by a power of two below 2**32, never by a multiple of 2**64.
Swapping two unequal integers changes the second sum by (x_i - x_j)(j - i), which is nonzero for
n < 2**31. Bits are compared, not numbers: 0.0 and -0.0 differ, and so do NaNs with other payloads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.errors import DriftError
from gradsync.sync.check_model import group_ranks, name_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")

_PIECE = 1 << 17
"""Number of integers widened to 64 bits at a time: 1 MiB stays in the cache."""
_BACK = "; go back to a checkpoint from before"
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Dtype used to read elements of 1 or 2 bytes; longer ones are read as int32."""


def check_replicas(
    tensors: Iterable[tuple[str, Tensor]],
    comm: Communicator,
    *,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    edited: Sequence[int] = (),
    heal: bool = False,
) -> bool:
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
        heal: if more than half of the ranks agree in all tensors, copy their values to the others
            (a broadcast of each tensor that differs) and return.

    Returns:
        Whether something was healed; rank 0 of `comm` logs what.

    Raises:
        DriftError: on every rank, names the first tensor that differs and the ranks in the
            minority; without a majority (always so on two ranks) it names both sides.
    """
    named = list(tensors)
    mine = replica_hashes(named)
    if same_on_all_ranks(comm, repr(mine).encode()):
        return False
    by_rank = all_gather_json(comm, mine)
    said = _difference(by_rank, step, ranks, edited)
    sides = group_ranks([json.dumps(hashes) for hashes in by_rank]).values()
    majority = max(sides, key=len)
    same_list = all(list(hashes) == list(mine) for hashes in by_rank)
    if not (heal and same_list and 2 * len(majority) > comm.world_size):
        raise DriftError(said, by_rank)
    for name, tensor in named:
        if any(hashes[name] != mine[name] for hashes in by_rank):
            whole = tensor.detach().contiguous()
            comm.broadcast(whole, majority[0]).wait()
            tensor.detach().copy_(whole)
    if comm.rank == 0:
        log.warning("%s; the majority's bits were copied", said.removesuffix(_BACK))
    return True


def replica_hashes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[int]]:
    """The hash of each named tensor; waits for the device once."""
    hashes = {name: hash_bits(tensor) for name, tensor in tensors}
    table = torch.stack(list(hashes.values())).cpu().tolist() if hashes else []
    return dict(zip(hashes, table, strict=True))


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
    return f"{where}: {verdict}{_BACK}"
