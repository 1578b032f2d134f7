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
import json
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.core.files import counted
from gradsync.errors import ConfigError, RunError
from gradsync.sync.check_model import group_ranks, name_ranks

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger("gradsync")


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Result of the message, equal on all ranks."""

    loss: list[float]
    """Sum of the ranks' `LossSum.message()`."""
    stop: bool
    """Whether any rank wants to stop."""
    discard: bool
    """Whether any rank wants to discard this step's gradients."""
    used: list[bool]
    """For each trainable parameter, whether any rank has a gradient for it."""
    counts: list[float]
    """Sums of the ranks' counts (leaves that changed a buffer)."""
    alike: bool
    """Whether all ranks sent the same digest."""
    same_order: bool
    """Whether all ranks that sent an order sent the same one."""
    changed: bool
    """Whether any rank found weights changed between steps, or samples of weights differ."""
    late: bool
    """Whether any rank takes part only in its optimizer's own step."""
    missing: int
    """Number of the loader's leaves that no rank passed to `backward`; 0 if unknown."""


def agree_on_metadata(
    comm: Communicator,
    used: Sequence[bool],
    counts: Sequence[int] = (),
    loss: Sequence[float] = (),
    *,
    stop: bool = False,
    discard: bool = False,
    number: int = 0,
    digest: Sequence[int] = (0, 0),
    order: str = "",
    dealt: tuple[int, int] = (0, 0),
    changed: bool = False,
    late: bool = False,
    sample: int = 0,
) -> StepMetadata:
    """Exchange the step's metadata: one all-reduce, whole group, on the CPU.

    float64 [18 + loss + parameters + counts]. Never waits for the device; overlaps the buckets.

    Args:
        comm: the ranks.
        used: for each trainable parameter, whether this rank has a gradient for it.
        counts: for each buffer, the number of this rank's leaves that changed it.
        loss: from `LossSum.message()`.
        stop: whether this rank wants to stop.
        discard: whether this rank wants the gradients discarded.
        number: number of the handle; all ranks must be at the same handle.
        digest: two numbers below 2^20, equal on ranks that step equally; see `settings_of`.
        order: the order of samples of this rank's leaves; "" if it has none to compare.
        dealt: from `LossSum.dealt`.
        changed: whether this rank's weights changed since the last step; see `ReplicaWatch`.
        late: whether this rank takes part in its optimizer's own step; see `user_loop.py`.
        sample: a number below 2^20, equal on ranks that hold the same weights; see `ReplicaWatch`.

    Raises:
        RunError: ranks are at the steps of different models.
    """
    # W n and W n^2 are the sums if all numbers equal n, and only then.
    marks = [power for n in (number + 1, *digest, sample) for power in (n, n**2)]
    order_mark = int(hash_text(order.encode()), 16) % 2**BITS if order else 0
    orders = [bool(order), order_mark, order_mark**2]
    given, expected = dealt
    leaves = [given, expected, expected > 0]
    parts = ([stop, discard, changed, late], marks, orders, leaves, loss, used, counts)
    message = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    comm.all_reduce(message).wait()
    flags, agreed_marks, (count, sum_1, sum_2), dealt_marks, losses, any_use, sums = (
        part.tolist() for part in message.split([len(part) for part in parts])
    )
    equal = [comm.world_size * mark == sum_ for mark, sum_ in zip(marks, agreed_marks, strict=True)]
    if not all(equal[:2]):
        raise RunError(
            "ranks call different operations at the same time: the others sum a step's metadata, "
            f"rank(s) {comm.rank} something else (only its own numbers came back)"
            if agreed_marks[:2] == marks[:2]
            else f"rank {comm.rank}: ranks synchronise different models at the same time: models "
            "that share a process group must take turns in one order on all ranks; or replicate "
            "them together, as one torch.nn.ModuleList"
        )
    stops, discards, changes, lates = (number > 0 for number in flags)
    any_used = [use > 0 for use in any_use]
    all_given, all_expected, knowing = dealt_marks  # all ranks that know expect the same number
    return StepMetadata(
        *(losses, stops, discards, any_used, sums),
        alike=all(equal[:-2]),
        same_order=count * sum_2 == sum_1**2,
        changed=changes or not all(equal[-2:]),
        late=lates,
        missing=round(all_expected / knowing - all_given) if knowing else 0,
    )


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


class LossSum:
    """This rank's losses (on `device`), weights and order of samples in a step. Sums over all ranks
    do not depend on the distribution of leaves, see [Note: Fixed bins]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self._orders: set[str] = set()
        self._leaves: set[int] = set()  # the loader's leaves, by index
        self._expected: set[int] = set()
        self._first = ""
        self._warned: set[str] = set()

    @property
    def num_leaves(self) -> int:
        """Number of leaves added."""
        return len(self._losses)

    @property
    def weight(self) -> float:
        """Number of targets (or samples) of this rank's leaves."""
        return math.fsum(self._weights)

    @property
    def is_finite(self) -> bool:
        """Whether this rank's losses are finite; not checked on CUDA, to avoid waiting."""
        return self._device.type == "cuda" or all(map(torch.isfinite, self._losses))

    @property
    def order(self) -> str:
        """The order of samples that the leaves belong to; "" without one, or for several loaders,
        since a rank may have skipped a leaf of one."""
        return "".join(self._orders) if len(self._orders) == 1 else ""

    @property
    def dealt(self) -> tuple[int, int]:
        """Number of the loader's leaves that this rank got, and number of leaves that the loader
        provided to all ranks; zeros if not known."""
        known = len(self._orders) == 1 and len(self._expected) == 1
        return (len(self._leaves), max(self._expected)) if known else (0, 0)

    def warn_of_data(self, missing: int) -> None:
        """Warn, once each, if no rank passed `missing` leaves of a step to `backward`, and if the
        data of the first step appear again, as a second loader provides them."""
        order = self.order
        if missing > 0:
            self._warn(
                f"{counted(missing, 'micro-batch', 'micro-batches')} of this step came from "
                "gs.loader, but to sync.backward on no rank, and nothing of them counts: it is "
                "called on every rank for each micro-batch, with weight=0 where none of its "
                "targets shall count"
            )
        if order and order == self._first:
            self._warn(
                "this step has the samples of the first one again, in the same order, and with the "
                "same random numbers: a new gs.loader begins anew; several passes are one loader "
                "with num_epochs=, or loaders with a seed= each"
            )
        self._first = self._first or order

    def _warn(self, text: str) -> None:
        if text[:20] not in self._warned:
            self._warned.add(text[:20])
            log.warning("%s (said once)", text)

    def add(self, loss_sum: Tensor, weight: float, micro_batch: Any = None) -> None:
        """Add one micro-batch's summed loss, [], and weight."""
        if order := getattr(micro_batch, "order", ""):
            self._orders.add(f"{order}, step {micro_batch.step}")
            self._leaves.add(micro_batch.index)
        self._expected.add(micro_batch.num_micro_batches if order else 0)
        self._losses.append(loss_sum.detach().to(self._device, torch.float64, copy=True))
        self._weights.append(weight)

    def clear(self) -> None:
        """Start over with no leaves."""
        self._losses.clear()
        self._weights.clear()
        self._orders.clear()
        self._leaves.clear()
        self._expected.clear()

    def message(self) -> list[float]:
        """This rank's part of the step's small message, [2 NUM_BINS]: the weight, and on a CPU,
        without waiting, the loss."""
        weights = to_bins(torch.tensor(self._weights, dtype=torch.float64)).tolist()
        losses = [0.0] * NUM_BINS if self._device.type == "cuda" else self._bins().tolist()
        return weights + losses

    @staticmethod
    def weight_over_ranks(summed: Sequence[float]) -> float:
        """Weight over all ranks, from the sum of their messages."""
        return from_bins(summed[:NUM_BINS])

    def over_ranks(self, comm: Communicator, summed: Sequence[float]) -> tuple[Tensor, float]:
        """Loss (float64 []) and weight over all ranks, from the sum of their messages.

        On CUDA by another all-reduce: whole group, float64 [NUM_BINS], on the device; overlaps
        the buckets in progress.
        """
        weight = self.weight_over_ranks(summed)
        if self._device.type != "cuda":
            return torch.tensor(from_bins(summed[NUM_BINS:]), dtype=torch.float64), weight
        bins = self._bins()
        comm.all_reduce(bins).wait()
        return bins[:-1].flip(0).sum() + bins[-1], weight

    def _bins(self) -> Tensor:
        if not self._losses:
            return torch.zeros(NUM_BINS, dtype=torch.float64, device=self._device)
        return to_bins(torch.stack(self._losses))


# -- settings of optimizers ----------------------------------------------------------------------

Settings = dict[str, str]
"""Text by name, in the order in which messages look for the first difference."""
STEPS = "number of optimizer.step() since the last synchronisation"
"""Name of a setting, in the user's training loop."""
_UNEVEN = (
    "each loss.backward() outside of sync.no_sync() is a synchronisation, of which all ranks need "
    "as many before a step: enclose all micro-batches of a step but the last in sync.no_sync(), "
    "skip no step on one rank alone, and go back to a checkpoint from before: weights differ now"
)
BITS = 20
"""Bits of each number of a digest: W n^2 is exact in float64 for up to 2^13 ranks."""
NOT_OPTIONS = frozenset({"params", "param_names"})
"""Entries of a parameter group that are not hyper-parameters."""


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a parameter group."""
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


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


def digest(settings: Settings) -> tuple[int, int]:
    """Two numbers of 20 bits, for `agree`; equal for different settings with probability 2**-40."""
    both = int(hash_text(json.dumps(settings).encode()), 16)
    return both % 2**BITS, both // 2**BITS % 2**BITS


def refuse_difference(comm: Communicator, settings: Settings, why: str) -> None:
    """Raise ConfigError on all ranks, since the digests of their `settings` differ. Names the first
    difference and each rank's value, then `why` (the consequence, and what to do).

    Two all-gathers (`all_gather_json`).
    """
    if found := first_difference(comm, settings):
        name, said = found
        raise ConfigError(f"{said}; {_UNEVEN if name == STEPS else why}")
    raise ConfigError(f"ranks list their optimizers' options in another order; {why}")


def first_difference(comm: Communicator, settings: Settings) -> tuple[str, str] | None:
    """Name of the first of the `settings` that differs between ranks, and a line with each rank's
    value; None if they are equal. Two all-gathers (`all_gather_json`)."""
    by_rank: list[Settings] = all_gather_json(comm, settings)
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        sides = group_ranks([settings.get(name, "nothing") for settings in by_rank])
        if len(sides) > 1:
            values = ", ".join(f"{name_ranks(ranks)} {value}" for value, ranks in sides.items())
            return name, f"{name} differs: {values}"
    return None


def _text(value: Any) -> str:
    """Text that is the same on all ranks for equal values, regardless of object identity."""
    if isinstance(value, int | None | str | complex | Enum):
        # An enum's repr shows the member's value, which may be any object.
        return str(value) if isinstance(value, Enum) else repr(value)
    if isinstance(value, float):
        whole = abs(value) < 2**53 and value.is_integer()
        return repr(int(value)) if whole else repr(float(value))  # 1 and 1.0 are equal options
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
