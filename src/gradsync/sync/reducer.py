"""The two halves of a strategy, by the phases of a step (step.py).

    collect    `Reducer.leaf`, `collect`    hooks put each ready gradient into its place in the sums
    reduce     `Reducer.launch`, `reduce`   the slices that a rank owns become the global mean
    clip       `Replicas.clip`              the exact norm, on owned slices
    update     `Replicas.update`            the optimizer, on owned slices
    publish    `Replicas.publish`           weights are whole on every rank again

A `Reducer` collects and sums; its `shards` define what a rank owns of the result. `Replicas` owns
everything, and is the base of classes that own less: shards (ZeRO-1 and 2, FSDP2), a share of
memory that a host's ranks have in common, or a replica that drifts between rounds.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.comm.finite import non_finite
from gradsync.comm.process_group import Done
from gradsync.core.torch_private import foreach_norm
from gradsync.errors import RunError
from gradsync.sync.norms import clip_gradients, scale_all

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gradsync.sync.buckets import Bucket
    from gradsync.sync.shares import HeldState, Share


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
        self._marks[0] = self._now()

    def stop(self) -> None:
        """Mark the end."""
        self._marks[1] = self._now()

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

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


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

    def leaf_begins(self) -> None:
        """Count the time since the last leaf or step as waiting for data."""
        self._data_s += time.perf_counter() - self._outside if self._outside else 0.0

    def leaf_ends(self) -> None:
        """Start counting here, at the end of a leaf or of the step."""
        self._outside = time.perf_counter()

    def step_ends(self, exposed: Stopwatch, met_s: float, leaves: int = 0) -> None:
        """Record a step with this number of `leaves` (0: unknown). This rank has waited for
        `exposed`, or for `met_s` seconds until all ranks arrived (strategies wait in different
        places). Every tenth time one all-gather: whole group, float64 [40], CPU; no overlap."""
        now = time.perf_counter()
        if self._comm is not None and self._ended:
            self._steps.append((now - self._ended, self._data_s, met_s, leaves, exposed))
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
    wall, data, wait, leaves = (float(part.median()) for part in ranks[slow].unbind(1))
    others = torch.cat([waits[:slow], waits[slow + 1 :]]).min(0).values
    lag = float((others - waits[slow]).median())
    if int((least == slow).sum()) < 0.9 * len(least) or lag < max(_LAG * wall, _LEAST_LAG_S):
        return -1, ""
    waited = f"the others wait for it, {100 * lag / wall:.0f} % of each step ({wall:.2g} s)"
    dealt = ranks[:, :, 3].median(1).values
    own = (ranks[:, :, 0].median(1).values - waits.median(1).values) / dealt.clamp(min=1)
    if leaves > dealt.min() and own[slow] < (1 + _LAG) * own[dealt > 0].median():
        return slow, (
            f"rank {slow} has {leaves:.0f} of a step's {int(dealt.sum())} micro-batches: {waited}; "
            f"a number that divides evenly among {len(ranks)} ranks would save that"
        )
    parts = {"computing": wall - data - wait, "waiting for data": data, "for others": wait}
    shares = ", ".join(f"{100 * part / wall:.0f} % {name}" for name, part in parts.items())
    return slow, f"rank {slow} is slow: {waited}, of which it spends {shares}"


class Replicas:
    """Every rank owns everything: whole gradients in `.grad`, weights and optimizer state.

    Args:
        model: on its device; its replicas are equal.
        parameters: its trainable parameters, tied ones once, in `named_parameters` order.
    """

    strategy = ""
    """Name that users pass as `gs.replicate(strategy=...)`; for messages."""
    takes_scaler = True
    """False if a step with inf or nan gradients, which a GradScaler skips, would do damage."""
    equal_replicas = True
    """False if replicas drift between rounds (then the strategy averages buffers)."""
    by_halves = False
    """True if sums go only to their owners when `sync.step` ends the step."""
    whole_parameters = True
    """False if a rank holds a share of each parameter. Then all ranks take part in every forward,
    and make the same number of forwards."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.model, self.parameters = model, list(parameters)
        self.updates: Callable[[Sequence[Tensor]], AbstractContextManager[Any]] = nullcontext
        """Encloses an update of these parameters that comes after `publish`."""
        self._given: list[Tensor] = []
        self._memory: list[Tensor] = []
        """Gradients as `take` provided them, and the memory that holds all of them."""

    # -- a step, in the order of its calls --------------------------------------------------------

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """Announce, before gradients are launched, which optimizers will step.

        Args:
            optimizers: [] in the user's training loop, and if a rank discards the step.
            scaled: whether a GradScaler reads the gradients too.

        Raises:
            ConfigError: an optimizer that the strategy cannot work with.
        """

    def take(
        self,
        buckets: Sequence[Bucket],
        used: Sequence[bool],
        factor: float | None,
        watch: Stopwatch,
    ) -> None:
        """Make owned slices from sums in `buckets`, times `factor`; `None` if no rank has any.

        Args:
            buckets: `flat(0)` holds the sum over ranks, or this rank's part of it.
            used: for each parameter, whether any rank has a gradient for it.
            factor: from sums to the mean; None in a step in which no rank updates.
            watch: stopped when nothing more is communicated.
        """
        watch.stop()
        for bucket in buckets:
            for parameter, gradient in bucket.gradients(used):
                parameter.grad = gradient
        found = [bucket.memory() for bucket in buckets]
        self._memory = [memory for memory in found if memory is not None]
        self._given = Replicas.owned(self) if len(self._memory) == len(found) else []
        self.scale(factor)

    def scale(self, factor: float | None) -> None:
        """Multiply `owned()` by `factor`, from sums to the mean."""
        if factor is not None:
            scale_all(self._memory_of(self.owned()), factor)

    def _memory_of(self, gradients: list[Tensor]) -> list[Tensor]:
        """A few large tensors in place of many small ones, if they are the ones `take` made."""
        same = len(gradients) == len(self._given) and all(map(is_, gradients, self._given))
        return self._memory if same else gradients

    def owned(self) -> list[Tensor]:
        """The gradient slices that this rank owns."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def whole_gradients(self) -> list[Tensor | None]:
        """Whole mean gradients of the parameters in their order, None if no rank had one.

        All ranks call it, between `Reducer.reduce` and `update`. For observers.
        """
        return [parameter.grad for parameter in self.parameters]

    def clip(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to an L2 norm of at most `max_norm`; returns the old norm, []."""
        gradients = self.owned()
        return clip_gradients(gradients, max_norm, self._memory_of(gradients))

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """Do one step of each optimizer on owned slices; optimizers hold different parameters."""
        for optimizer in optimizers:
            optimizer.step()

    def settle(self) -> None:
        """Wait for started work before collectives of the main thread's group, if the lane uses
        another group: NCCL needs the kernels of both in one order on all ranks."""

    def publish(self) -> Work:
        """Make weights whole on every rank, at the end of every step; gradients are cleared.

        Wait for the returned work before reading weights; here they are whole already. If the
        update comes even later, weights wait for it by themselves.
        """
        return Done()

    def wait(self) -> None:
        """Return when all weights of the last step are complete; needs no action by other ranks."""

    def close(self) -> None:
        """Leave whole weights and state in this rank's private memory."""

    # -- between steps; all ranks call each -------------------------------------------------------

    def synchronize_replicas(self) -> None:
        """Make replicas equal if the strategy lets them drift on purpose."""

    def gather(self, optimizer: Optimizer) -> None:
        """Make `optimizer.state` whole on every rank, with the model's parameters as keys, for a
        checkpoint; `scatter` undoes it."""

    def scatter(self, optimizer: Optimizer) -> None:
        """Take this rank's part of a whole `optimizer.state`, after `gather` or loading."""

    def sharded_state_dict(self, optimizer: Optimizer) -> HeldState | None:
        """This rank's part of `optimizer`'s state, sharing its memory; None if it is whole."""
        return None

    def load_sharded_state_dict(
        self, optimizer: Optimizer, states: Mapping[Any, dict[str, Any]]
    ) -> None:
        """Restore a part from `sharded_state_dict`, on the parameters' device."""
        raise RunError(f"strategy={self.strategy!r} has whole state on every rank")

    def sharded_weights(self) -> dict[str, tuple[Share, Tensor]] | None:
        """This rank's part of parameters and buffers by the names of `model.state_dict()`, flat,
        sharing their memory; None if every rank holds them whole."""
        return None

    def load_sharded_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part with the result of `sharded_weights`."""
        raise RunError(f"strategy={self.strategy!r} has whole weights on every rank")

    def full_weights(self) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, as `model.state_dict()`."""
        return dict(self.model.state_dict())

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with whole ones, equal on all ranks."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def state_tensors(self) -> dict[str, Tensor]:
        """State that the strategy keeps between steps, equal on all ranks after `gather`."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore tensors from `state_tensors`.

        Raises:
            RunError: tensors of another strategy.
        """
        if tensors:
            raise RunError(f"this strategy remembers nothing, got {', '.join(tensors)}")


class Reducer(ABC):
    """One way of summing gradients over ranks, bound to one model whose replicas are equal.

    Args:
        model: on its device.
        comm: all ranks.
        shards: what this rank owns; None means everything.
    """

    strategy = ""
    """Name that users pass as `gs.replicate(strategy=...)`."""
    own_gradients = False
    """True if `named_gradients` are this rank's alone, whatever was sent."""
    user_loop = False
    """True if it supports the user's training loop (`loss.backward()`, `optimizer.step()`)."""
    waits_in_backward = False
    """True if exposed communication happens in backward instead of at the end of the step."""
    needs_micro_step = False
    """True if it must know before a forward what its backward will do."""

    def __init__(
        self, model: nn.Module, comm: Communicator, shards: Replicas | None = None
    ) -> None:
        self.model = model
        self.comm = comm
        self.parameters: list[nn.Parameter] = [p for _, p in trainable(model)]
        """Trainable parameters, tied ones once, in `named_parameters` order."""
        self.shards = Replicas(model, self.parameters) if shards is None else shards
        self.non_finite = NonFinite()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward that the training step calls (for most strategies: the model's)."""
        return self.model(*inputs, **named)

    def prime(self, forward_backward: Callable[[], None]) -> None:  # noqa: B027  optional
        """Fix the layout now, if the strategy learns it from its first backward.

        Otherwise a resumed run would begin with another grouping of sums than the run it continues,
        and bits would change. `forward_backward` is one throwaway micro-step through `forward`.
        """

    def watch(self, on_gradient: Callable[[nn.Parameter], bool]) -> list[Any]:
        """Call `on_gradient(parameter)` for each gradient that arrives without an enclosing `leaf`.

        It returns whether the current backward is the last one before gradients are used.

        Returns:
            Handles of the hooks.
        """
        return [
            p.register_post_accumulate_grad_hook(_as_hook(on_gradient)) for p in self.parameters
        ]

    @contextmanager
    def micro_step(self, *, last: bool) -> Generator[None]:
        """Enclose one forward and backward; `last` if it completes this rank's gradients.

        `last` must be True on all ranks of a step or on none.
        """
        yield

    @contextmanager
    def leaf(self, *, last: bool, index: int | None = None) -> Generator[None]:
        """Enclose one backward of this rank.

        Args:
            last: no other leaf of this rank follows in this step.
            index: the leaf's place in the global batch; None when it is unknown.
        """
        yield

    def collect(self, *, discard: bool, user_loop: bool) -> None:  # noqa: B027  optional
        """End this rank's leaves, before `launch` in every step.

        Args:
            discard: no rank will use the sums, so drop this rank's leaves.
            user_loop: gradients in `.grad` count, regardless of their origin.
        """

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's contribution to the sums, except what has been sent."""
        return ((name, p.grad) for name, p in trainable(self.model) if p.grad is not None)

    def gradient_memory(self, *, large: bool) -> list[Tensor]:
        """Memory of `named_gradients`; unless `large`, only with up to `SMALL` elements each."""
        own = (gradient.detach() for _, gradient in self.named_gradients())
        return [gradient for gradient in own if large or gradient.numel() <= SMALL]

    def launch(self) -> list[bool]:
        """Start the remaining communication; returns which parameters have gradients here."""
        return [parameter.grad is not None for parameter in self.parameters]

    @abstractmethod
    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        """Finish: the slices that this rank owns (`shards.owned()`) become the sum over all ranks,
        divided by `divisor`.

        Args:
            used: for each trainable parameter, whether any rank has a gradient for it.
            divisor: the weight of the sum; None in a step in which no rank updates.

        Returns:
            Duration of communication that nothing overlapped.
        """

    def close(self) -> None:  # noqa: B027  optional
        """Release threads and hooks; the model stays usable."""


class NaiveReducer(Reducer):
    """`naive`: one blocking all-reduce for each parameter, after backward.

    The shortest correct code; all other strategies are checked against it. Bytes per rank and
    step: 2(W-1)/W x the gradients (a ring, Patarasuk & Yuan 2009); nothing overlaps.
    """

    own_gradients = user_loop = True

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        watch = sum_gradients(self.parameters, used, self.comm)
        self.shards.scale(divisor and 1 / divisor)
        return watch


def sum_gradients(
    parameters: Sequence[nn.Parameter], used: Sequence[bool], comm: Communicator
) -> Stopwatch:
    """All-reduce every used parameter's gradient over the whole group, one after the other.

    A rank without a gradient for a used parameter (or without data) contributes zeros, because all
    ranks must issue the same operations. The gradient of a parameter that no rank used stays None.

    Args:
        parameters: trainable parameters, in one order on all ranks.
        used: for each of them, whether any rank has a gradient for it.
        comm: the ranks.
    """
    watch = Stopwatch(on_cuda=any(parameter.is_cuda for parameter in parameters))
    watch.start()
    for parameter, any_rank in zip(parameters, used, strict=True):
        if any_rank:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.resolve_conj().resolve_neg()  # bytes are sent
            # Whole group, the parameter's shape and dtype; intentionally overlaps nothing.
            comm.all_reduce(parameter.grad).wait()
    watch.stop()
    return watch


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters with their names, tied ones once, in `named_parameters` order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _as_hook(on_gradient: Callable[[nn.Parameter], bool]) -> Callable[[Any], None]:
    def gradient_is_ready(parameter: Any) -> None:
        on_gradient(parameter)

    return gradient_is_ready


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
        self,
        parts: Sequence[Tensor],
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        large: bool = True,
    ) -> None:
        """Note the names of gradients that are not finite.

        Args:
            parts: memory of gradients, read once. Names are read only if a part is not finite.
            named: the gradients.
            large: whether `parts` contain large gradients too.
        """
        plain = [p for p in parts if p.is_floating_point() and p.layout == torch.strided]
        if len(plain) == len(parts) and (
            not plain or torch.stack(foreach_norm(plain)).isfinite().all()
        ):
            return
        if found := non_finite((n, g) for n, g in named() if large or g.numel() <= SMALL):
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
