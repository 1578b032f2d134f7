"""What watches a step: a stopwatch, which rank is slow, whose gradients are not finite."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.finite import non_finite
from gradsync.core.torch_private import foreach_norm

if TYPE_CHECKING:
    from torch import Tensor


log = logging.getLogger("gradsync")


class Stopwatch:
    """Measures one interval: `start`, `stop`, and later `seconds()`.

    On CUDA it records events and reads them only on request, so that measuring does not
    synchronise the step. Wall-clock time would measure the launch there, not the work.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._marks: list[Any] = [None, None]

    def start(self) -> None:
        """Mark the beginning."""
        self._mark(0)

    def stop(self) -> None:
        """Mark the end."""
        self._mark(1)

    def copy(self) -> Stopwatch:
        """Copy this reading, so that later measurements do not change it."""
        other = Stopwatch(on_cuda=self._on_cuda)
        other._marks = list(self._marks)
        return other

    def seconds(self) -> float:
        """Time from `start` to `stop`, in seconds; waits until the GPU has reached `stop`.

        0.0 if one of them was never called.
        """
        first, last = self._marks
        if first is None or last is None:
            return 0.0
        if not self._on_cuda:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def _mark(self, place: int) -> None:
        if self._on_cuda:
            self._marks[place] = torch.cuda.Event(enable_timing=True)
            self._marks[place].record()
        else:
            self._marks[place] = time.perf_counter()


_WINDOW = 10
"""Number of steps that are examined together."""
_LAG, _LEAST_LAG_S = 0.2, 0.001
"""How long the others must wait for a rank: share of a step, and seconds."""


class StragglerWatch:
    """Warns of a rank that the others repeatedly wait for.

    A backward takes equally long on a slow rank and on the others, because all wait in it for the
    slowest. But the slowest rank waits least. A rank is named if in nine of ten steps it has waited
    less than all others, in the median by a fifth of a step and 1 ms. So a pause (a checkpoint by
    rank 0, an evaluation) does not count, nor does noise that affects one rank after the other.

    Args:
        comm: the ranks; None if ranks do different things in a step, as a pipeline's stages do.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm if comm is not None and comm.world_size > 1 else None
        self._steps: list[tuple[float, float, float, int, Stopwatch]] = []
        self._ended, self._outside, self._data_s = 0.0, 0.0, 0.0
        self._said = -1

    def micro_batch_begins(self) -> None:
        """Count the time since the last micro-batch or step as waiting for data."""
        self._data_s += time.perf_counter() - self._outside if self._outside else 0.0

    def micro_batch_ends(self) -> None:
        """Start counting here, at the end of a micro-batch or of the step."""
        self._outside = time.perf_counter()

    def step_ends(self, exposed: Stopwatch, met_s: float, micro_batches: int = 0) -> None:
        """Record a step with this number of `micro_batches` (0: unknown). This rank has waited for
        `exposed`, or for `met_s` seconds until all ranks arrived (strategies wait in different
        places). Every tenth time one all-gather: whole group, float64 [40], CPU; no overlap."""
        now = time.perf_counter()
        if self._comm is not None and self._ended:
            self._steps.append((now - self._ended, self._data_s, met_s, micro_batches, exposed))
        self._ended, self._data_s = now, 0.0
        # One step more, to avoid waiting for a GPU.
        if self._comm is not None and len(self._steps) > _WINDOW:
            steps = self._steps[:_WINDOW]
            rows = [(*times, max(met, watch.seconds()), n) for *times, met, n, watch in steps]
            mine = torch.tensor(rows, dtype=torch.float64)
            everyone = torch.zeros(self._comm.world_size * mine.numel(), dtype=torch.float64)
            self._comm.all_gather(everyone, mine.flatten()).wait()
            self._steps.clear()
            slow, said = find_straggler(everyone.view(-1, *mine.shape))
            if said and slow != self._said and self._comm.rank == 0:
                log.warning(said)
            self._said = slow


def find_straggler(ranks: Tensor) -> tuple[int, str]:
    """The rank that all others wait for, and the message about it; (-1, "") for no such rank.

    Args:
        ranks: seconds of a step, of waiting for data and of waiting for others, and micro-batches,
            [W, steps, 4].
    """
    waits = ranks[:, :, 2]
    least = waits.argmin(0)
    slow = int(least.mode().values)
    wall, data, wait, micro_batches = (float(part.median()) for part in ranks[slow].unbind(1))
    others = torch.cat([waits[:slow], waits[slow + 1 :]]).min(0).values
    lag = float((others - waits[slow]).median())
    if int((least == slow).sum()) < 0.9 * len(least) or lag < max(_LAG * wall, _LEAST_LAG_S):
        return -1, ""
    waited = f"the others wait for it, {100 * lag / wall:.0f} % of each step ({wall:.2g} s)"
    dealt = ranks[:, :, 3].median(1).values
    own = (ranks[:, :, 0].median(1).values - waits.median(1).values) / dealt.clamp(min=1)
    if micro_batches > dealt.min() and own[slow] < (1 + _LAG) * own[dealt > 0].median():
        return slow, (
            f"rank {slow} has {micro_batches:.0f} of a step's {int(dealt.sum())} micro-batches: "
            f"{waited}; a number that divides evenly among {len(ranks)} ranks would save that"
        )
    parts = {"computing": wall - data - wait, "waiting for data": data, "for others": wait}
    shares = ", ".join(f"{100 * part / wall:.0f} % {name}" for name, part in parts.items())
    return slow, f"rank {slow} is slow: {waited}, of which it spends {shares}"


SMALL = 16_384
"""Largest size, in elements, of a gradient that is checked in every step: a norm's, a bias's."""
_CUDA_STEPS = 100
"""Steps between two checks of the gradients on CUDA, where each check waits for the device."""


class NonFinite:
    """Warns when this rank's gradients become nan or inf, before sums hide which rank caused it.
    Warns once, until they are finite again.

    Per step: `look` before gradients are sent, in one or several parts; then `step_ends`. A
    non-finite value in one layer's activations reaches norms and biases of all layers before it.
    """

    def __init__(self) -> None:
        self._step = 0
        self._said = False
        self._found: list[str] = []

    def is_due(self, *, on_cuda: bool) -> bool:
        """Whether to check in this step."""
        return not on_cuda or self._step % _CUDA_STEPS == 0

    def look(
        self, parts: Sequence[Tensor], named: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Note the names of gradients that are not finite.

        Args:
            parts: memory of gradients, read once. Names are read only if a part is not finite.
            named: the gradients.
        """
        plain = [p for p in parts if p.is_floating_point() and p.layout == torch.strided]
        if len(plain) == len(parts) and (
            not plain or torch.stack(foreach_norm(plain)).isfinite().all()
        ):
            return
        if found := non_finite(named()):
            self._found.append(found)

    def step_ends(self, rank: int) -> None:
        """Warn about this step's findings; the step number counts from this model's first step."""
        self._step += 1
        if self._found and not self._said:
            log.warning(
                "rank %d, step %d: nan or inf in this rank's gradient of %s; every rank gets it "
                "with the next sum or average",
                *(rank, self._step, ", ".join(self._found)),
            )
        self._said, self._found = bool(self._found), []
