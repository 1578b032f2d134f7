"""Weights that wait: a parameter whose new value is on its way, and whatever touches it first.

A parameter is marked by its class, which torch asks before every function and
attribute that gets the tensor: in the forward of any module, in `state_dict`, `deepcopy`,
`torch.save`, NumPy, averages of weights that hold references, on any thread. When its update is
done the class is put back, so that a parameter costs nothing from then on. Looks at its shape and
the like do not wait.

Not noticed: memory that another tensor shares (`can_be_marked` finds it), and C++ code that gets
the tensor past torch's functions. So modules wait for their own parameters before a forward, too.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.comm.base import Work
from gradsync.core.files import one_line
from gradsync.core.torch_private import (
    FRAMES,
    as_plain_tensors,
    storage_address,
    storage_uses,
    wait_before_swap,
    without_dispatch_modes,
)
from gradsync.errors import RunError

log = logging.getLogger("gradsync")

_ARRIVE, _ARRIVE_ALL = "_gradsync_arrive", "_gradsync_arrive_all"
_SET_GRAD = attrgetter("__set__")(Tensor.grad)
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "is_leaf"),
    *("grad", "grad_fn", "is_cuda", "is_cpu", "is_sparse"),
)
_LOOKS = frozenset(
    {
        *(attrgetter("__get__")(getattr(Tensor, name)) for name in _ATTRIBUTES),
        *(Tensor.size, Tensor.stride, Tensor.numel, Tensor.dim, Tensor.is_contiguous),
        *(Tensor.is_inference, Tensor.element_size),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    }
)
"""Functions that do not need the values."""


class PendingParameter(nn.Parameter):
    """A parameter while its new value is on its way."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for all pending parameters among the arguments, then call `func`."""
        kwargs = kwargs or {}
        if func in _LOOKS or (func == _SET_GRAD and args[1] is None):
            with as_plain_tensors():
                return func(*args, **kwargs)
        for parameter in _pending([args, kwargs]):
            wait_for(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        wait_for(self, all_of_them=True)  # no module is to be copied with its hook
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        wait_for(self, all_of_them=True)
        return self.__reduce_ex__(proto)


def mark(
    parameters: Iterable[nn.Parameter],
    arrive: Callable[[], None],
    arrive_all: Callable[[], None],
) -> None:
    """Call `arrive` before one of `parameters` is touched, which calls `unmark` with them all; or
    `arrive_all`, before it is copied with its model."""
    for parameter in parameters:
        vars(parameter).update({_ARRIVE: arrive, _ARRIVE_ALL: arrive_all})
        parameter.__class__ = PendingParameter


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Turn marked parameters back into ordinary ones; leave others as they are."""
    for parameter in filter(is_pending, parameters):
        parameter.__class__ = nn.Parameter
        vars(parameter).pop(_ARRIVE, None)
        vars(parameter).pop(_ARRIVE_ALL, None)


def is_pending(tensor: Tensor) -> bool:
    """Whether a parameter is marked."""
    return type(tensor) is PendingParameter


def wait_for(tensor: Tensor, *, all_of_them: bool = False) -> None:
    """Wait for a parameter, if it is marked, or for all that are marked with it."""
    arrive = vars(tensor).get(_ARRIVE) if is_pending(tensor) else None
    if arrive is not None:
        (vars(tensor)[_ARRIVE_ALL] if all_of_them else arrive)()


wait_before_swap(PendingParameter, wait_for)


def can_be_marked(parameter: nn.Parameter, own: int = 1) -> bool:
    """Whether every way to its values leads through the object itself, or another of the caller's
    `own` tensors: none else (a view, a `detach()`, a NumPy array over it) shares its memory, and no
    class of its own reads it."""
    if type(parameter) is not nn.Parameter:
        return False
    storage = parameter.untyped_storage()
    is_shared = parameter.is_cpu and storage.is_shared()  # other processes see it
    own_memory = storage.resizable()  # torch's, not an array's
    return num_uses(parameter) == own and own_memory and not is_shared


def num_uses(tensor: Tensor) -> int:
    """Number of tensors and arrays that share its memory, itself among them."""
    return storage_uses(storage_address(tensor.untyped_storage())) - 1  # that object is one, too


def _pending(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if is_pending(value):
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _pending(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _pending(each)


class WaitingWeights:
    """A model's weights after a step: each is brought up to date before it is first touched.

    Args:
        model: whose modules wait for their own parameters before their forward.
    """

    def __init__(self, model: nn.Module) -> None:
        own = [(m, list(m.parameters(recurse=False))) for m in model.modules()]
        self._modules = [(m, held) for m, held in own if any(p.requires_grad for p in held)]
        self._lock = threading.RLock()
        self._works: dict[int, Work] = {}
        self._buckets: Sequence[Sequence[nn.Parameter]] = ()
        self._hooks: list[Any] = []
        self._broken = ""
        self._update: Callable[[int], object] = _nothing
        self._ended: Callable[[], object] = _nothing

    def expect(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        works: Sequence[Work],
        update: Callable[[int], object],
        *,
        late: bool,
        ended: Callable[[], object] | None = None,
    ) -> None:
        """Call `update(number)` once for each bucket, when its work is done and one of its
        parameters is touched, or now, unless `late`; and `ended()`, if given, after the last."""
        with self._lock:
            self._buckets, self._update, self._ended = buckets, update, ended or _nothing
            self._works = dict(enumerate(works))
            if not late:
                self.wait()
                return
            for number, bucket in enumerate(buckets):
                mark(bucket, lambda number=number: self._arrive(number), self.wait)
            self._hooks = [
                module.register_forward_pre_hook(partial(_wait_for_own, held))
                for module, held in self._modules
            ]

    def wait(self) -> None:
        """Bring all of them up to date; asks nothing of other ranks."""
        with self._lock:
            for number in reversed(range(len(self._buckets))):
                self._arrive(number)

    def _arrive(self, number: int) -> None:
        """Update the weights of a bucket, whatever mode the code that touched them runs in: state
        that is made in inference mode could not be changed."""
        modes = (torch.no_grad(), torch.inference_mode(False), without_dispatch_modes())
        # Marked until the end: another thread must not find half of an update.
        with self._lock, modes[0], modes[1], modes[2], as_plain_tensors():
            if self._broken:
                raise RunError(f"{self._broken}: close this handle, and go back to a checkpoint")
            if number not in self._works:
                return
            self._works[number].wait()
            self._broken = f"the update of weights was interrupted at bucket {number}"
            del self._works[number]
            kind = self._buckets[number][0].device.type
            with torch.autocast(kind, enabled=False):
                self._update(number)
            unmark(self._buckets[number])
            self._broken = ""
            if not self._works:
                self._ended()
                self._forget()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets, self._works = [], (), {}
        self._update = self._ended = _nothing

    def close(self) -> None:
        """Wait for all, and where they do not come say so; no parameter stays marked."""
        try:
            self.wait()
        except Exception as error:
            log.warning(
                "the weights of the last step did not all arrive (%s): go back to a checkpoint",
                one_line(error),
            )
        for bucket in self._buckets:
            unmark(bucket)
        self._forget()
        self._broken = ""


def _nothing(*_: Any) -> None:
    """Nothing is left to do."""


def _wait_for_own(held: Sequence[nn.Parameter], *_: Any) -> None:
    for parameter in held:
        wait_for(parameter)


class WaitingState(MutableMapping[Any, Any]):
    """Stands for `optimizer.state` while updates are on their way: the first look waits.

    Args:
        state: the optimizer's own.
        arrive: makes the updates, and puts `state` back into the optimizer.
    """

    def __init__(self, state: MutableMapping[Any, Any], arrive: Callable[[], None]) -> None:
        self.own, self._arrive = state, arrive

    def _there(self) -> MutableMapping[Any, Any]:
        self._arrive()
        return self.own

    def __getitem__(self, key: Any) -> Any:
        return self._there()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._there()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._there()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._there()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def __getattr__(self, name: str) -> Any:
        """Whatever else the state can do (`copy`, `default_factory`)."""
        return getattr(self._there(), name)

    def __repr__(self) -> str:
        return repr(self._there())

    def __reduce__(self) -> Any:
        return self._there().__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._there(), memo)


def has_compiled() -> bool:
    """Whether this process has compiled anything (or may have: where torch does not count)."""
    frames = sys.modules.get(FRAMES)
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0
