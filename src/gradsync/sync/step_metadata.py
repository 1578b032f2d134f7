"""The one small message of a step: values that only the host knows, summed over all ranks.

It carries losses and weights as exact sums, which parameters have gradients, requests to stop or
discard, and a digest of the optimizers' settings. A rank with another learning rate (a scheduler on
its own loss, a checkpoint that only rank 0 loaded) trains another model. When ranks divide the
update, all get a mixture, and no comparison of replicas can detect it. So it is compared first.

[Note: Fixed bins] The bits of these sums depend on neither order nor grouping, unlike the bits of
float sums. Below 2^200 a number is cut into its multiples of 2^170, the remaining multiples
of 2^140, and so on down to 2^-220; anything smaller is dropped. A part is an integer of 30 bits on
the scale of its bin, so up to 2^23 parts add without rounding in float64, here or by an all-reduce.
Only the sum of the bins rounds, equally on all ranks. One message is enough, since ranks need not
agree on a scale. (Demmel and Nguyen 2013, "Fast reproducible floating-point summation".)
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError, RunError

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")


@dataclass(kw_only=True, slots=True)
class StepMetadata:
    """What a rank tells the others at a step's end, and what all of them told."""

    used: list[bool]
    """For each trainable parameter, whether this rank (any rank) has a gradient for it."""
    counts: Sequence[float] = ()
    """For each buffer, the number of (all) leaves that changed it."""
    loss: Sequence[float] = ()
    """From `LossSum.message()`; their sum."""
    dealt: float = 0.0
    """The share from `LossSum.source()`; their sum."""
    stop: bool = False
    """Whether this rank (any rank) wants to stop."""
    discard: bool = False
    """Whether this rank (any rank) wants to discard this step's gradients."""
    changed: bool = False
    """Whether weights changed since the last step; of all, also if samples of weights differ."""
    late: bool = False
    """Whether this rank (any rank) takes part only in its optimizer's own step."""
    rank_waits: bool = False
    """Whether a rank that was started again waits to join; rank 0 knows."""
    marks: Mapping[str, int | None]
    """Numbers from `mark_of`, with the same names on all ranks; None where this rank has nothing to
    compare. "model" is the number of the handle; "weights" are samples of them."""
    unlike: frozenset[str] = frozenset()
    """Names of the marks that differ between ranks."""


def agree_on_metadata(comm: Communicator, mine: StepMetadata) -> StepMetadata:
    """What all ranks told, equal on all of them: one all-reduce, whole group, on the CPU.

    float64 [6 + 5 marks + loss + parameters + counts]. Never waits for the device; overlaps the
    buckets.

    Raises:
        RunError: ranks are at the steps of different models.
    """
    flags = [mine.stop, mine.discard, mine.changed, mine.late, mine.rank_waits, mine.dealt]
    powers = [_powers(mark) for mark in mine.marks.values()]
    parts = (flags, *powers, mine.loss, mine.used, mine.counts)
    message = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    comm.all_reduce(message).wait()
    sums = [part.tolist() for part in message.split([len(part) for part in parts])]
    (*wishes, dealt), *of_marks, loss, used, counts = sums
    by_name = dict(zip(mine.marks, of_marks, strict=True))
    if by_name["model"][0] != comm.world_size:
        raise RunError(
            "ranks call different operations at the same time: the others sum a step's metadata, "
            f"rank(s) {comm.rank} something else (only its own numbers came back)"
        )
    unlike = set()
    for name, found in by_name.items():
        # k numbers are equal if and only if k times the sum of their squares is the square of
        # their sum.
        count, low, high, low_2, high_2 = map(int, found)
        if count * low_2 != low**2 or count * high_2 != high**2:
            unlike.add(name)
    if "model" in unlike:
        raise RunError(
            f"rank {comm.rank}: ranks synchronise different models at the same time: models that "
            "share a process group must take turns in one order on all ranks; or replicate them "
            "together, as one torch.nn.ModuleList"
        )
    stop, discard, changed, late, rank_waits = (number > 0 for number in wishes)
    return StepMetadata(
        **{"used": [use > 0 for use in used], "counts": counts, "loss": loss, "dealt": dealt},
        **{"stop": stop, "discard": discard, "late": late, "marks": mine.marks},
        rank_waits=rank_waits,
        unlike=frozenset(unlike),
        changed=changed or "weights" in unlike,
    )


_BITS = 20
"""Bits of each half of a mark: its squares add exactly in float64 for up to 2^13 ranks."""


def mark_of(content: bytes) -> int:
    """A number of 40 bits; equal for different contents with probability 2**-40."""
    return int(hash_text(content), 16) % 2 ** (2 * _BITS)


def _powers(mark: int | None) -> list[int]:
    """What shows in a sum over ranks whether marks differ: 1, the mark's halves, their squares."""
    if mark is None:
        return [0] * 5
    high, low = divmod(mark, 2**_BITS)
    return [1, low, high, low**2, high**2]


# -- sums of losses and weights --------------------------------------------------------------------

_LIMIT = 2.0**200
_UNITS = tuple(2.0**exponent for exponent in range(170, -221, -30))
NUM_BINS = len(_UNITS) + 1
"""The last bin adds, unchanged, numbers of 2^200 and more, infinite and undefined ones."""


@functools.cache
def _on_cuda(device: torch.device) -> Tensor:
    """The units, copied to `device` once, because a copy waits for all work of the device."""
    return torch.tensor(_UNITS, dtype=torch.float64, device=device)


def to_bins(values: Tensor) -> Tensor:
    """The sum of `values` (float64 [L]) in bins, float64 [NUM_BINS]; does not wait."""
    units = _on_cuda(values.device) if values.is_cuda else torch.tensor(_UNITS, dtype=values.dtype)
    inside = values.abs() < _LIMIT
    # [L, bins]: a value without its bits below each unit; powers of two scale exactly.
    cut = (values.where(inside, 0.0)[:, None] / units).trunc() * units
    parts = cut.diff(dim=1, prepend=torch.zeros_like(cut[:, :1]))
    rest = values.where(~inside, 0.0)
    return torch.cat([parts.sum(0), rest.sum()[None]])


def from_bins(bins: Sequence[float]) -> float:
    """The sum, rounded once, of bins that were added up anywhere."""
    *ordinary, rest = bins
    return math.fsum(ordinary) + rest


NO_LOSS = (0.0,) * (2 * NUM_BINS)
"""Message of a rank whose loop gives no loss. It is as long as the others', since a rank that
discards a step may not know how they end it."""


_DROPPED = (
    "some of this step's micro-batches came from gs.loader, but to sync.backward on no rank, and "
    "nothing of them counts: it is called on every rank for each micro-batch, with weight=0 where "
    "none of its targets shall count (said once)"
)
_AGAIN = (
    "this step has the samples of the first one again, in the same order, and with the same random "
    "numbers: a new gs.loader begins anew; several passes are one loader with num_epochs=, or "
    "loaders with a seed= each (said once)"
)


class LossSum:
    """This rank's losses (on `device`), weights and order of samples in a step. Sums over all ranks
    do not depend on the distribution of micro-batches, see [Note: Fixed bins]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self._dealt: set[tuple[str, int, int]] = set()
        """Of each micro-batch: order of samples, place in the step, and how many the step has."""
        self._first = ""  # order of the first step
        self._said: set[str] = set()
        self.num_micro_batches = 0

    @property
    def weight(self) -> float:
        """Number of targets (or samples) of this rank's micro-batches."""
        return math.fsum(self._weights)

    @property
    def is_finite(self) -> bool:
        """Whether this rank's losses are finite; not checked on CUDA, to avoid waiting."""
        return self._device.type == "cuda" or all(map(torch.isfinite, self._losses))

    def source(self) -> tuple[str, float]:
        """The order of samples that the micro-batches belong to, "" without one or for several
        loaders (a rank may have skipped a micro-batch of one); and the share of all ranks'
        micro-batches that the loader gave to this rank, 0.0 if it is not known."""
        orders = {order for order, _, _ in self._dealt} - {""}
        totals = {total for _, _, total in self._dealt}
        if len(orders) != 1:
            return "", 0.0
        return orders.pop(), len(self._dealt) / totals.pop() if len(totals) == 1 else 0.0

    def warn_of_data(self, dealt: float) -> None:
        """Warn, once each, if ranks passed less than all micro-batches of a step to `backward`
        (`dealt` is the sum of their shares), and if the data of the first step appear again, as a
        second loader provides them."""
        order, _ = self.source()
        again = bool(order) and order == self._first
        for text, wrong in ((_DROPPED, 0 < dealt < 1 - 1e-6), (_AGAIN, again)):
            if wrong and text not in self._said:
                self._said.add(text)
                log.warning(text)
        self._first = self._first or order

    def add(self, loss_sum: Tensor, weight: float, micro_batch: Any = None) -> None:
        """Add one micro-batch's summed loss, [], and weight."""
        place = ("", 0, 0)
        if order := getattr(micro_batch, "order", ""):
            step = f"{order}, step {micro_batch.step}"
            place = step, micro_batch.index, micro_batch.num_micro_batches
        self._dealt.add(place)
        self.num_micro_batches += 1
        self._losses.append(loss_sum.detach().to(self._device, torch.float64, copy=True))
        self._weights.append(weight)

    def clear(self) -> None:
        """Start over with no micro-batches."""
        self.num_micro_batches = 0
        for each in (self._losses, self._weights, self._dealt):
            each.clear()

    def message(self) -> list[float]:
        """This rank's part of the step's small message, [2 NUM_BINS]: the weight, and on a CPU,
        without waiting, the loss."""
        weights = to_bins(torch.tensor(self._weights, dtype=torch.float64)).tolist()
        if self._device.type == "cuda" or not self._losses:
            return weights + [0.0] * NUM_BINS
        return weights + to_bins(torch.stack(self._losses)).tolist()

    def over_ranks(self, comm: Communicator, summed: Sequence[float]) -> tuple[Tensor, float]:
        """Loss (float64 []) and weight over all ranks, from the sum of their messages.

        On CUDA by another all-reduce: whole group, float64 [NUM_BINS], on the device; overlaps
        the buckets in progress.
        """
        weight = from_bins(summed[:NUM_BINS])
        if self._device.type != "cuda":
            return torch.tensor(from_bins(summed[NUM_BINS:]), dtype=torch.float64), weight
        bins = torch.zeros(NUM_BINS, dtype=torch.float64, device=self._device)
        if self._losses:
            bins = to_bins(torch.stack(self._losses))
        comm.all_reduce(bins).wait()
        return bins[:-1].flip(0).sum() + bins[-1], weight


# -- settings of optimizers ----------------------------------------------------------------------

Settings = dict[str, str]
"""Text by name, in the order in which messages look for the first difference."""


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a parameter group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def settings_of(optimizer: Optimizer, parameters: Sequence[Tensor], *, number: int = 0) -> Settings:
    """Class, hyper-parameters and parameters of each group; equal on ranks that step equally.

    Waits for tensors on a device. Objects count by class, functions by name, because neither has a
    text that is the same on all ranks. `parameters` are the model's, in an order common to all
    ranks. `number` is the optimizer's place among the optimizers that step together.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    which = f" of optimizer {number}" if number else ""
    kind = type(optimizer)
    found = {f"the class{which or ' of the optimizer'}": f"{kind.__module__}.{kind.__qualname__}"}
    for index, group in enumerate(optimizer.param_groups):
        where = f" of group {index}{which}"
        found |= {f"{name}{where}": _text(value) for name, value in options(group).items()}
        members = array("q", [places.get(id(parameter), -1) for parameter in group["params"]])
        held = hash_text(array("q", sorted(members)).tobytes())[:8]
        found[f"the list of parameters{where}"] = f"{len(members)} ({held})"
        # A set has another order in each process, and states would go to other parameters.
        found[f"the order of parameters{where}"] = hash_text(members.tobytes())[:8]
    return found


def _text(value: Any) -> str:
    """Text that is the same on all ranks for equal values, regardless of object identity."""
    if isinstance(value, int | float | None | str | complex):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = (
            (repr(key) if isinstance(key, str | int) else type(key).__qualname__, _text(entry))
            for key, entry in value.items()
        )
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in pairs) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(entry) for entry in value)})"
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return _text(value.tolist())
    return getattr(value, "__qualname__", type(value).__qualname__)


def hash_text(content: bytes) -> str:
    """16 hexadecimal digits, equal in any process."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# -- what a micro-batch adds ----------------------------------------------------------------------


def weight_of(weight: float | Tensor | None, micro_batch: Any) -> float:
    """Weight of a micro-batch, a finite number >= 0: `weight`, or its number of targets."""
    given = getattr(micro_batch, "num_targets", None) if weight is None else weight
    if given is None:
        raise TypeError(
            "backward() needs the micro-batch of gs.loader, sync.backward(loss, micro_batch), or "
            "weight=, the number of targets that the loss is the mean of"
        )
    weight = float(given)
    if not 0 <= weight < math.inf:
        raise ConfigError(f"backward(weight=...) must be a finite number >= 0, got {weight}")
    return weight


def to_sum(loss: Tensor, weight: float, reduction: str) -> Tensor:
    """The sum of a micro-batch's loss, [], over its `weight` targets; see [Note: Mean or sum] in
    gradient_sync.py."""
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"backward(reduction=...) must be 'mean' or 'sum', got {reduction!r}")
    if loss.dim() and loss.numel() == 1:
        loss = loss.reshape(())
    if reduction == "sum":
        return loss
    return loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
