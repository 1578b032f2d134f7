"""Parameters and optimizer state whose new values are on their way: who touches one waits for it.

    mark(parameters, arrive)      `arrive()` runs before torch reads or writes one of them
    WaitingState(state, arrive)   the same for `optimizer.state`

A parameter is marked by its class, which torch asks before every function and attribute that gets
the tensor: in the forward of any module, in `state_dict`, `deepcopy`, `torch.save`, NumPy, an
average of weights that holds references, on any thread. `arrive` puts the class back, so that a
parameter costs nothing once it is there. Looks at its shape and the like do not wait.

Not noticed: memory that another tensor shares (`shares_memory` finds it; then do not mark), and C++
code that is given the tensor past torch's functions. Modules are therefore marked too: the forward
of one that holds such parameters waits for its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from gradsync.core.torch_private import as_plain_tensors, storage_uses

_ARRIVE = "_gradsync_arrive"
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "is_leaf"),
    *("grad", "grad_fn", "is_cuda", "is_cpu", "is_sparse"),
)
_LOOKS = frozenset(
    {
        *(attrgetter("__get__")(getattr(Tensor, name)) for name in _ATTRIBUTES),
        *(Tensor.size, Tensor.stride, Tensor.numel, Tensor.dim, Tensor.is_contiguous),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference, Tensor.element_size),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    }
)
"""What can be asked without the values."""


class PendingParameter(nn.Parameter):
    """A parameter while its new value is on its way."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for all pending parameters among the arguments, then call `func`."""
        kwargs = kwargs or {}
        if func in _LOOKS:
            with as_plain_tensors():
                return func(*args, **kwargs)
        for parameter in _pending([args, kwargs]):
            wait_for(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        wait_for(self)
        return self.__reduce_ex__(proto)


def mark(parameters: Iterable[nn.Parameter], arrive: Callable[[], None]) -> None:
    """Call `arrive` before one of `parameters` is touched; it calls `unmark` with all of them."""
    for parameter in parameters:
        vars(parameter)[_ARRIVE] = arrive
        parameter.__class__ = PendingParameter


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Make ordinary parameters of them again."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter
        vars(parameter).pop(_ARRIVE, None)


def is_pending(tensor: Tensor) -> bool:
    """Whether a parameter is marked."""
    return type(tensor) is PendingParameter


def wait_for(tensor: Tensor) -> None:
    """Wait for a parameter, if it is marked."""
    arrive = vars(tensor).get(_ARRIVE) if is_pending(tensor) else None
    if arrive is not None:
        arrive()


def can_be_marked(parameter: nn.Parameter) -> bool:
    """Whether every way to its values leads through the object itself: no other tensor (a view, a
    `detach()`, a NumPy array over it) shares its memory, and no class of its own reads it."""
    return type(parameter) is nn.Parameter and storage_uses(parameter) == 1


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


class WaitingState(MutableMapping[Any, Any]):
    """Stands for `optimizer.state` while updates are on their way: the first look waits.

    Args:
        state: the optimizer's own.
        arrive: makes the updates, and puts `state` back into the optimizer.
    """

    def __init__(self, state: MutableMapping[Any, Any], arrive: Callable[[], None]) -> None:
        self.state, self._arrive = state, arrive

    def _there(self) -> MutableMapping[Any, Any]:
        self._arrive()
        return self.state

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

    def __repr__(self) -> str:
        return repr(self._there())

    def __reduce__(self) -> Any:
        return self._there().__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._there(), memo)


def own_state(state: Any) -> Any:
    """An optimizer's state without what stands for it."""
    return state.state if isinstance(state, WaitingState) else state
