"""What a rank owns of a step's result: whole replicas, their exact norm, clipping, the update.

    clip       `Replicas.clip`      the exact norm, on owned slices
    update     `Replicas.update`    the optimizer, on owned slices
    publish    `Replicas.publish`   weights are whole on every rank again

`Replicas` owns everything, and is the base of classes that own less: shards (ZeRO-1 and 2, FSDP2),
a share of memory that a host's ranks have in common, or a replica that drifts between rounds.

[Note: Waiting weights] Weights may be updated when the next forward needs them. A module waits for
its own parameters before its forward, as in FSDP2 and DeAR (Zhang et al. 2023, arXiv 2302.12445).
Nothing else waits. A program that reads a weight or an optimizer's state between two steps in
another way must call `Replicas.wait` first; `gradsync train` does.

[Note: Fixed blocks] A norm is a sum, and a sum's bits depend on its grouping: per-parameter, flat
and sharded norms of the same gradient gave four different values. So the grouping is fixed. Each
parameter is cut into blocks of 65,536 elements, each block's norm is computed alone (fp32), and
the squares are added in float64 in parameter order. It does not depend on buckets, shards or ranks.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import Done
from gradsync.core.files import one_line
from gradsync.core.torch_private import FRAMES, foreach_copy_, foreach_mul_, foreach_norm
from gradsync.errors import RunError
from gradsync.sync.layout import BLOCK
from gradsync.sync.watch import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gradsync.sync.buckets import Bucket
    from gradsync.sync.shares import HeldState, Share

log = logging.getLogger("gradsync")


class Replicas:
    """Every rank owns everything: whole gradients in `.grad`, weights and optimizer state.

    A handle has it as `sync.replica`, for gradsync's own commands; scripts use the handle.

    Args:
        model: on its device; its replicas are equal.
        comm: all ranks.
    """

    takes_scaler = True
    """False if a step with inf or nan gradients, which a GradScaler skips, would do damage."""
    equal_replicas = True
    """False if replicas drift between rounds (then the strategy averages buffers)."""
    by_halves = False
    """True if sums go only to their owners when `sync.step` ends the step."""
    whole_parameters = True
    """False if a rank holds a share of each parameter. Then all ranks take part in every forward,
    and make the same number of forwards."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self.comm = model, comm
        self.parameters = [parameter for _, parameter in trainable(model)]
        self.strategy = ""
        """Name that users pass as `gs.replicate(strategy=...)`; for messages."""
        self.exposed = Stopwatch(on_cuda=any(p.is_cuda for p in self.parameters))
        """Measures communication that nothing overlaps, until `take` has what it needs."""
        self.waiting: WaitingWeights | None = None
        """Weights that the next forward updates, under strategies that postpone this."""
        self.under_way: Sequence[Work] = ()
        """Work of the last step in a group that only the lane uses. It ends before collectives of
        the main thread's group: NCCL needs the kernels of both in one order on all ranks."""
        self._given: list[Tensor] = []
        self._memory: list[Tensor] = []
        """Gradients as `take` provided them, and the few large tensors that hold all of them."""

    # -- a step, in the order of its calls

    def prepare(self, optimizers: Sequence[Optimizer], *, scaled: bool) -> None:
        """Announce, before gradients are launched, which optimizers will step ([] in the user's
        training loop), and whether a GradScaler reads the gradients too. ConfigError: an optimizer
        that the strategy cannot work with."""

    def take(self, buckets: Sequence[Bucket], used: Sequence[bool], factor: float | None) -> None:
        """Make owned slices from sums in `buckets`, times `factor`; `None` if no rank has any.

        Args:
            buckets: `flat(0)` holds the sum over ranks, or this rank's part of it.
            used: for each parameter, whether any rank has a gradient for it.
            factor: from sums to the mean; None in a step in which no rank updates.
        """
        self.exposed.stop()
        for bucket in buckets:
            for parameter, gradient in bucket.gradients(used):
                parameter.grad = gradient
        found = [bucket.memory() for bucket in buckets]
        self._memory = [memory for memory in found if memory is not None]
        self._given = Replicas.owned(self) if len(self._memory) == len(found) else []
        self.scale(factor)

    def scale(self, factor: float | Tensor | None) -> None:
        """Multiply `owned()` by `factor`; None leaves it. If it is what `take` made, a few large
        tensors stand for many small ones."""
        if factor is None:
            return
        held = self.owned()
        if len(held) == len(self._given) and all(map(is_, held, self._given)):
            held = self._memory
        # Between tensors [] torch promotes dtypes; between [1] and [], as in shards, it does not.
        scale_all([m if m.dim() else m.view(1) for m in held], factor)

    def owned(self) -> list[Tensor]:
        """The gradient slices that this rank owns."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def whole_gradients(self) -> list[Tensor | None]:
        """Whole mean gradients of the parameters in their order, None if no rank had one.

        All ranks call it, between `Reducer.reduce` and `update`. For observers.
        """
        return [parameter.grad for parameter in self.parameters]

    def clip(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to an L2 norm of at most `max_norm` (Pascanu et al. 2013, arXiv
        1211.5063); returns the old norm, []."""
        norm = gradient_norm(self.owned())
        self.scale(clip_factor(norm, max_norm))
        return norm

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """Do one step of each optimizer on owned slices; optimizers hold different parameters."""
        for optimizer in optimizers:
            optimizer.step()

    def publish(self) -> Work:
        """Make weights whole on every rank, at the end of every step; gradients are cleared.

        Wait for the returned work before reading weights; here they are whole already. If the
        update comes even later, weights wait for it by themselves.
        """
        return Done()

    def wait(self) -> None:
        """Return when this rank's weights and state are those of the last step; needs no action by
        other ranks. See [Note: Waiting weights]."""
        if self.waiting is not None:
            self.waiting.wait()

    def close(self) -> None:
        """Leave whole weights and state in this rank's private memory."""
        if self.waiting is not None:
            self.waiting.close()

    # -- between steps; all ranks call each

    def synchronize_replicas(self) -> None:
        """Make replicas equal if the strategy lets them drift on purpose."""

    def gather(self, optimizer: Optimizer) -> None:
        """Make `optimizer.state` whole on every rank, with the model's parameters as keys, for a
        checkpoint; `scatter` undoes it."""
        self.wait()

    def scatter(
        self, optimizer: Optimizer, states: Mapping[Any, dict[str, Any]] | None = None
    ) -> None:
        """Take this rank's part of a whole `optimizer.state`, after `gather` or loading; or the
        part `states`, from `sharded_state_dict`, on the parameters' device."""

    def sharded_state_dict(self, optimizer: Optimizer) -> HeldState | None:
        """This rank's part of `optimizer`'s state, sharing its memory; None if it is whole."""
        return None

    def sharded_weights(self) -> dict[str, tuple[Share, Tensor]] | None:
        """This rank's part of parameters and buffers by the names of `model.state_dict()`, flat,
        sharing their memory; None if every rank holds them whole."""
        return None

    def full_weights(self) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, as `model.state_dict()`. They may be the model's
        own tensors, which the next step changes."""
        self.wait()
        return dict(self.model.state_dict())

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with whole ones, equal on all ranks."""
        self.wait()
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def state_tensors(self) -> dict[str, Tensor]:
        """State that the strategy keeps between steps, equal on all ranks after `gather`."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore tensors from `state_tensors`; RunError: they are another strategy's."""
        if tensors:
            raise RunError(f"this strategy remembers nothing, got {', '.join(tensors)}")


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters with their names, tied ones once, in `named_parameters` order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def owned_update(
    made: MutableMapping[Optimizer, tuple[Any, Any]],
    optimizer: Optimizer,
    make: Callable[[Optimizer], Any],
    settings: object = None,
) -> Any:
    """This rank's part of an optimizer's steps, which it updates alone. All ranks call it together.

    Args:
        made: what was made before, for which parameters and `settings`; if these have changed
            (`add_param_group`), it gives the state back and another one is made.
        optimizer: what is made must not refer to it, so that deleting it frees the memory of both.
        make: divides the optimizer's work.
        settings: of the optimizer, as far as what it keeps depends on them.
    """
    key = [[id(p) for p in group["params"]] for group in optimizer.param_groups], settings
    before, update = made.get(optimizer, (None, None))
    if update is None or before != key:
        if update is not None:
            update.give_back(optimizer)
        update = make(optimizer)
        made[optimizer] = key, update
    return update


def tell(optimizer: Optimizer) -> None:
    """Call the user's `optimizer.step` without gradients, for its schedulers and hooks only."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    optimizer.step()
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient


# -- weights that wait


class WaitingWeights:
    """A model's weights after a step; each is up to date when its module's forward begins.

    Args:
        model: if it has an attribute `read_after`, this names the modules whose weights the model's
            own forward reads, each with the module whose forward comes before: {"head": "norm"}.
    """

    def __init__(self, model: nn.Module) -> None:
        own = {m: [*m.parameters(recurse=False)] for m in model.modules()}
        reads: Any = getattr(model, "read_after", {})
        for name, before in reads.items():
            if (module := getattr(model, name)) is not None:
                own[getattr(model, before)] += own[module]
        self._modules = [(m, held) for m, held in own.items() if any(p.requires_grad for p in held)]
        self._lock = threading.RLock()
        self._hooks: list[Any] = []
        self._broken = self._kind = ""
        self._forget()

    def expect(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        works: Sequence[Work],
        update: Callable[[int], object],
        ended: Callable[[], object] | None = None,
    ) -> None:
        """Call `update(number)` once for each bucket, when its work is done and one of its
        parameters is needed; immediately if `has_compiled`. Then call `ended()`, if given."""
        with self._lock:
            self._update, self._ended = update, ended
            self._works, self._kind = dict(enumerate(works)), buckets[0][0].device.type
            self._numbers = {id(p): number for number, held in enumerate(buckets) for p in held}
            if has_compiled():
                self.wait()
                return
            self._hooks = [
                module.register_forward_pre_hook(partial(self.wait, held))
                for module, held in self._modules
            ]

    def wait(self, held: Sequence[nn.Parameter] | None = None, *_: Any) -> None:
        """Bring weights up to date, all or those in `held`; needs no action by other ranks."""
        with self._lock:
            numbers = sorted(self._works, reverse=True)
            if held is not None:
                numbers = [self._numbers[id(p)] for p in held if id(p) in self._numbers]
            for number in numbers:
                self._arrive(number)

    def _arrive(self, number: int) -> None:
        """Update the weights of a bucket with the forward's modes turned off: state that is made in
        inference mode could not be changed."""
        with self._lock:
            if self._broken:
                raise RunError(f"{self._broken}: close this handle, and go back to a checkpoint")
            if number not in self._works or self._update is None:
                return
            self._works[number].wait()
            self._broken = f"the update of weights was interrupted at bucket {number}"
            autocast = torch.autocast(self._kind, enabled=False)
            with torch.no_grad(), torch.inference_mode(False), autocast:
                self._update(number)
            del self._works[number]
            self._broken = ""
            if not self._works:
                if self._ended is not None:
                    self._ended()
                self._forget()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._works: dict[int, Work] = {}
        self._numbers: dict[int, int] = {}
        """The bucket of each waiting parameter, by the parameter's id."""
        self._update: Callable[[int], object] | None = None
        self._ended: Callable[[], object] | None = None

    def close(self) -> None:
        """Wait for all weights, and report if they do not arrive."""
        try:
            self.wait()
        except Exception as error:
            log.warning(
                "the weights of the last step did not all arrive (%s): go back to a checkpoint",
                one_line(error),
            )
        self._forget()
        self._broken = ""


def has_compiled() -> bool:
    """Whether this process has compiled anything (or may have, if torch does not count). With other
    hooks than before, code would be compiled again."""
    frames = sys.modules.get(FRAMES)
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


# -- norms

_ROWS = 256
"""Number of blocks whose norms a GPU computes in one call."""


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all `gradients`, fp32 [] (fp64 if one of them is), see [Note: Fixed blocks]."""
    if not gradients:
        return torch.zeros(())
    double = any(gradient.dtype == torch.float64 for gradient in gradients)
    # Contiguous, because a sum over strided memory is grouped differently.
    in_blocks = (
        (g,) if g.numel() <= BLOCK else g.view(-1).split(BLOCK)
        for g in (gradient.contiguous() for gradient in gradients)
    )
    return norm_from_blocks(norms_of_blocks([*chain(*in_blocks)]), double=double)


def norms_of_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """L2 norm of each of `blocks`, contiguous; fp64 [len(blocks)]."""
    return norms_in_rows(blocks) if blocks and blocks[0].is_cuda else _norms_alone(blocks)


def _norms_alone(blocks: Sequence[Tensor]) -> Tensor:
    # 16-bit blocks are widened first, or their norms would be rounded to 16 bits.
    wide = [block.float() if block.element_size() == 2 else block for block in blocks]
    dtypes = {block.dtype for block in wide}
    if len(dtypes) == 1:
        return torch.stack(foreach_norm(wide)).double()
    # One call per dtype: on a GPU a call with several takes another kernel, with other bits.
    found: dict[int, Tensor] = {}
    for dtype in dtypes:
        places = [place for place, block in enumerate(wide) if block.dtype == dtype]
        norms = foreach_norm([wide[place] for place in places])
        found.update(zip(places, norms, strict=True))
    return torch.stack([found[place].double() for place in range(len(wide))])


def norms_in_rows(blocks: Sequence[Tensor]) -> Tensor:
    """`norms_of_blocks` with few launches. Whole blocks are stacked to rows, always equally many,
    since on a GPU a sum's grouping depends on the shape. The rest goes one by one, in one call."""
    rows = [block.numel() == BLOCK and block.element_size() <= 4 for block in blocks]
    whole = [block for block, in_row in zip(blocks, rows, strict=True) if in_row]
    rest = [block for block, in_row in zip(blocks, rows, strict=True) if not in_row]
    found = []
    room = blocks[0].new_zeros((_ROWS if whole else 0, BLOCK), dtype=torch.float32)
    for first in range(0, len(whole), _ROWS):
        taken = whole[first : first + _ROWS]
        foreach_copy_(list(room[: len(taken)].unbind()), taken)
        found.append(torch.linalg.vector_norm(room, dim=1)[: len(taken)].double())
    if rest:
        found.append(_norms_alone(rest))
    return torch.cat(found)[_in_order(tuple(rows), blocks[0].device)]


@functools.cache
def _in_order(rows: tuple[bool, ...], device: torch.device) -> Tensor:
    """Places of the blocks, with those in rows first; copied to `device` once, since a copy waits
    for all work of the device."""
    order = sorted(range(len(rows)), key=lambda number: not rows[number])
    return torch.tensor(order).argsort().to(device)


def norm_from_blocks(norms: Tensor, *, double: bool) -> Tensor:
    """The total norm, fp32 (fp64 if `double`) [], from the norms of all blocks in order."""
    # In a fixed order: cumsum's on a CPU, for any vector width; on a GPU cumsum varies, sum() not.
    total = norms.square().sum() if norms.is_cuda else norms.square().cumsum(0)[-1]
    return total.sqrt().to(torch.float64 if double else torch.float32)


def total_norm(norms: Tensor, parameters: Sequence[Tensor], used: Sequence[bool]) -> Tensor:
    """`norm_from_blocks` of the `parameters` that are `used`; `norms` are those of all blocks."""
    if not all(used):
        counts = torch.tensor([-(-p.numel() // BLOCK) for p in parameters])
        here = torch.tensor(used).repeat_interleave(counts).to(norms.device)
        norms = norms.where(here, 0.0)
    pairs = zip(parameters, used, strict=True)
    return norm_from_blocks(norms, double=any(p.dtype == torch.float64 for p, u in pairs if u))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor, at most 1, that scales a gradient of norm `norm` to at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_all(tensors: list[Tensor], factor: Any) -> None:
    """Multiply in place, by a number or a tensor []. Skips a factor 1.0 (gradients that need no
    clipping) if it is known without waiting for a device."""
    is_known = isinstance(factor, float) or factor.device.type == "cpu"
    if tensors and not (is_known and float(factor) == 1.0):
        foreach_mul_(tensors, factor)


def clip_shards(
    shards: list[Tensor], max_norm: float, comm: Communicator, device: torch.device
) -> Tensor:
    """Like `Replicas.clip`, for gradients that are divided among ranks; a rank may hold none. The
    norm is that of all gradients; its last bits depend on how they are cut."""
    square = gradient_norm(shards).to(device).double().square()
    # Whole group, float64 []; overlaps nothing, since the factor depends on it.
    comm.all_reduce(square).wait()
    double = any(shard.dtype == torch.float64 for shard in shards)
    norm = square.sqrt() if double else square.sqrt().float()
    scale_all(shards, clip_factor(norm, max_norm))
    return norm
