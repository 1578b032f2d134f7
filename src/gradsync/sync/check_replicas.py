"""Replicas that differ: a comparison of all bits, and a watch for edits between steps.

[Note: Replica hash] A tensor's bits are read as integers x_0 .. x_{n-1} (of 1, 2 or 4 bytes; longer
elements as several). Its hash is the pair (sum of x_i, sum of (i + 1) x_i), both modulo 2**64.
One flipped bit changes the first sum by a power of two below 2**32, never by a multiple of 2**64.
Two swapped unequal integers change the second by (x_i - x_j)(j - i), which for n < 2**31 is not 0
either. Bits are compared, not numbers: 0.0 and -0.0 differ, and so do two NaNs with other payloads.

[Note: Signs of an edit] A checkpoint that only rank 0 loads, or `weight.mul_` in one rank's branch,
makes replicas that differ. Where ranks divide the update among themselves the next step mixes them,
and they are equal again: so it must be detected before the update. Each rank looks for cheap signs,
and all compare once one has found some; `check_replicas` finds the edits that these miss.

    version counters       any in-place operation of autograd, `load_state_dict`
    addresses              `parameter.data = other`
    samples, on a CPU      `parameter.data.mul_`, a NumPy array over the memory: some elements of
                           each of `_SAMPLED` parameters, others after every step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, all_gather_numbers, same_on_all_ranks
from gradsync.core.torch_private import version
from gradsync.errors import RunError
from gradsync.sync.check_model import group_ranks, name_ranks
from gradsync.sync.optimizers import Settings, refuse_difference
from gradsync.sync.step_metadata import StepMetadata

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_PIECE = 1 << 17
"""Number of integers widened to 64 bits at a time: 1 MiB stays in the cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Dtype used to read elements of 1 or 2 bytes; longer ones are read as int32."""
_SAMPLED = 64
"""Parameters that are sampled after a step, and before the next; about 3 us each."""
_ELEMENTS = 8
"""Elements sampled of each parameter."""


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
    ([Note: Replica hash]); two more (`all_gather_json`) only when digests differ, so that
    differences never make it hang. Waits for the device once.

    Args:
        tensors: such as `replica_tensors(model, [optimizer])`.
        comm: the ranks that hold replicas.
        step: for the message.
        ranks: names of the ranks of `comm` in messages, where that is not the whole run.
        edited: ranks known to have changed their tensors.

    Raises:
        RunError: on every rank, names the first tensor that differs and the ranks in the
            minority; without a majority (always so on two ranks) both sides are named.
    """
    hashes = [(name, hash_bits(tensor)) for name, tensor in tensors]
    table = torch.stack([each for _, each in hashes]).cpu().tolist() if hashes else []
    mine = {name: row for (name, _), row in zip(hashes, table, strict=True)}
    if not same_on_all_ranks(comm, repr(mine).encode()):
        raise RunError(_difference(all_gather_json(comm, mine), step, ranks, edited))


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
    """Message about the ranks' hashes by tensor; the other arguments as for `check_replicas`."""
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
            "all ranks alike"
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


class ReplicaWatch:
    """This rank's replica after the last step, see [Note: Signs of an edit]; frozen parameters
    too. Not `equal` are ranks that hold different weights on purpose: these are not watched."""

    def __init__(self, model: nn.Module, comm: Communicator, *, equal: bool) -> None:
        self._comm = comm
        watched = equal and comm.world_size > 1
        self._named = list(model.named_parameters()) if watched else []
        self._weights = [parameter for _, parameter in self._named if _is_plain(parameter)]
        self._states: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._turn = 0
        self._edited = False
        self.remember()

    def remember(self, *optimizers: Optimizer) -> None:
        """Accept weights, and the state of `optimizers`, as they are on this rank."""
        self._turn += 1
        self._signs = self._signs_now()
        self.accept_states(*optimizers)

    def accept_states(self, *optimizers: Optimizer) -> None:
        """Take the state of `optimizers` for the one that steps: ranks have just compared it."""
        for optimizer in optimizers:
            self._states[optimizer] = optimizer.state

    def state_of(self, optimizer: Optimizer) -> str:
        """Origin of its state, the same on ranks that load alike."""
        if optimizer not in self._states:
            # Merely reading `state[parameter]` makes an empty entry.
            loaded = any(optimizer.state.values())
            return "loaded before the first step" if loaded else "empty"
        kept = self._states[optimizer] is optimizer.state
        return "kept from the last step" if kept else "loaded since the last step"

    def changed(self, *optimizers: Optimizer) -> bool:
        """Whether weights have changed, or one of these states was loaded, since `remember`; or
        were found so before, and never compared."""
        if not self._edited:
            loaded = any(self.state_of(optimizer).startswith("loaded") for optimizer in optimizers)
            self._edited = loaded or self._signs != self._signs_now()
        return self._edited

    def refuse_unlike(self, agreed: StepMetadata, settings: Settings, why: str) -> None:
        """Raise on all ranks when they differ in what the step's message compared: in `settings`
        (ConfigError, see `refuse_difference`), or in all weights (RunError), which are compared
        when they have changed on some rank. Not in a step that is discarded."""
        if agreed.discard:
            return
        if not agreed.alike:
            refuse_difference(self._comm, settings, why)
        if agreed.changed:
            # Whole group, int64 [1], then the cost of `check_replicas`.
            told = all_gather_numbers(self._comm, int(self._edited))
            self._edited = True
            edited = [rank for rank, number in enumerate(told) if number]
            check_replicas(self._named, self._comm, edited=edited)
            self._edited = False

    def gradients(self) -> list[list[int]]:
        """Hashes of this rank's gradients; waits for the device."""
        grads = [weight.grad for weight in self._weights]
        return [[] if grad is None else hash_bits(grad).tolist() for grad in grads]

    def _signs_now(self) -> tuple[list[int], list[int], bytes]:
        """Versions and addresses of all weights, and the bits of a few elements of some."""
        weights, count = self._weights, len(self._weights)
        first = self._turn * _SAMPLED % count if count > _SAMPLED else 0
        parts = [_few(w.detach()) for w in weights[first : first + _SAMPLED] if _readable(w)]
        sample = torch.cat(parts).view(torch.uint8).numpy().tobytes() if parts else b""
        return [version(w) for w in weights], [w.data_ptr() for w in weights], sample


def _is_plain(weight: Tensor) -> bool:
    """Whether the tensor has memory to look at, and counts its versions."""
    is_dense = type(weight) is torch.nn.Parameter and weight.layout == torch.strided
    return is_dense and not weight.is_inference()


def _readable(weight: Tensor) -> bool:
    """Whether it can be read without waiting for a device."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def _few(weight: Tensor) -> Tensor:
    """Up to `_ELEMENTS` elements at equal distances, the first one among them."""
    count = min(_ELEMENTS, weight.numel())
    return weight.as_strided((count,), ((weight.numel() - 1) // max(count - 1, 1) or 1,))
