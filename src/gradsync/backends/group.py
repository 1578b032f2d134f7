"""The process group `shm`: collectives of CPU tensors through shared memory, all others by gloo.

[Note: One choice on all ranks] Whether an operation goes through shared memory must be decided
alike on all ranks, from properties that torch requires to be equal: which operation, how many
tensors, their dtypes and sizes. Strides may differ, so strided tensors are copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from gradsync.backends.lane import Lane, LaneOperation
from gradsync.comm.base import ReduceOp, Work
from gradsync.comm.process_group import AllOf, Done, ProcessGroupCommunicator
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.core.torch_private import (
    backend_of,
    device_types,
    num_issued,
    outside_graphs,
    set_backends,
    set_timeout,
    timeout_of,
)
from gradsync.errors import RunError
from gradsync.runtime.gloo_group import wait_until_workers_sleep

log = logging.getLogger("gradsync")

NAME = "shm"

_OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_NUMBERS = _FLOATS | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_MOVABLE = _NUMBERS | {torch.bool, torch.complex64, torch.complex128}


def register() -> None:
    """Make `shm` a backend of torch.distributed; harmless when called again."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def create(asked: Any, _options: object = None) -> Any:
    """Make a group for this rank, as torch's `_DistributedBackendOptions` ask; all its ranks call.

    A `SharedMemoryGroup`; or torch's own group with the same backends (gloo, and NCCL for CUDA) for
    one rank, and where ranks cannot share memory.
    """
    plain = _plain_group(asked, _gloo(asked))
    if asked.group_size == 1:
        return plain
    try:
        # Two small all-gathers over the group's ranks, through gloo.
        shared = share_memory(ProcessGroupCommunicator(plain))
    except SharedMemoryError as error:
        is_default = not asked.global_ranks_in_group
        if is_default and asked.group_rank == 0:
            # As text: stored log records must not keep this error's frames, and so gloo, alive.
            log.warning("backend shm: collectives by gloo: %s", str(error))
        return plain
    return SharedMemoryGroup(plain, shared)


def _gloo(asked: Any) -> Any:
    """A gloo backend, made as torch makes it."""
    store = dist.PrefixStore("gloo", asked.store)
    gloo = dist.ProcessGroupGloo(store, asked.group_rank, asked.group_size, asked.timeout)
    gloo.options.global_ranks_in_group = asked.global_ranks_in_group
    gloo.options.group_name = asked.group_id
    return gloo


def _plain_group(asked: Any, gloo: Any) -> dist.ProcessGroup:
    """A torch group with gloo for the CPU, and NCCL where there are GPUs.

    Torch takes a group written in Python as it is, without the backends that "cpu:shm,cuda:nccl"
    names for other devices; so NCCL is added here.
    """
    group = dist.ProcessGroup(asked.store, asked.group_rank, asked.group_size)
    backends = {"cpu": gloo}
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        set_timeout(options, asked.timeout)
        options.global_ranks_in_group = asked.global_ranks_in_group
        options.group_name = asked.group_id
        store = dist.PrefixStore("nccl", asked.store)
        backends["cuda"] = dist.ProcessGroupNCCL(store, asked.group_rank, asked.group_size, options)
    set_backends(group, backends)
    return group


@outside_graphs
class SharedMemoryGroup(dist.ProcessGroup):
    """A group of ranks on one host; methods have torch's names and options.

    Messages, gather, scatter, reduce, all-to-all and `monitored_barrier` are inherited: torch's
    class passes them to gloo, which is registered as the backend for the CPU.

    Args:
        plain: torch's own group of the same ranks: gloo, and NCCL for CUDA if there is any.
        shared: the same ranks over shared memory; closed with this group.
    """

    def __init__(self, plain: dist.ProcessGroup, shared: SharedMemoryCommunicator) -> None:
        # A class written in Python cannot give torch the store; see `get_group_store`.
        super().__init__(plain.rank(), plain.size())  # pyrefly: ignore
        backends = {kind: backend_of(plain, kind) for kind in device_types(plain)}
        set_backends(self, backends)
        self._plain: Any = plain
        self._lane = Lane(shared, partial(timeout_of, backends["cpu"]))

    def name(self) -> str:
        """Name of the backend, as given to `init_process_group`."""
        return NAME

    def get_group_store(self) -> dist.Store:
        """The store of this group's keys."""
        return self._plain.get_group_store()

    def _get_sequence_number_for_group(self) -> int:
        """How many operations were issued, by whatever way."""
        return num_issued(self._plain) + self._lane.num_issued

    def split_group(self, *_: object, **__: object) -> Any:
        """Refuse: torch's own needs a store, which a Python class cannot give it."""
        raise RunError("a group of backend shm cannot be split; use dist.new_group(ranks)")

    def merge_remote_group(self, *_: object, **__: object) -> Any:
        raise RunError("a group of backend shm cannot be merged; use dist.new_group(ranks)")

    # -- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, *given: Any, **named: Any) -> Any:
        # Torch makes one sum of several tensors.
        kind, one = c10d.AllreduceOptions, _are_lists(tensors) and len(tensors) == 1
        done = self._all_reduce(kind, tensors, given, named) if one else None
        return done or self._plain.allreduce(tensors, *given, **named)

    def allreduce_coalesced(self, tensors: Any, *given: Any, **named: Any) -> Any:
        """All-reduce each tensor."""
        return self._all_reduce(c10d.AllreduceCoalescedOptions, tensors, given, named) or (
            self._plain.allreduce_coalesced(tensors, *given, **named)
        )

    def _all_reduce(
        self, kind: type, tensors: Sequence[Tensor], given: Any, named: Any
    ) -> LaneOperation | None:
        options = _options_of(kind, given, named)
        op = _op_of(options, tensors)
        if op is None:
            return None
        combine: ReduceOp = op
        whole = [tensor.data for tensor in tensors]

        def start(shared: SharedMemoryCommunicator) -> Work:
            # Whole group; each [numel], in place, its own dtype; all in progress at once.
            return AllOf([shared.all_reduce(tensor, combine) for tensor in whole])

        return self._issue(options, tensors, start, mean_of=whole)

    def reduce_scatter(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        options = _options_of(c10d.ReduceScatterOptions, given, named)
        tensors = self._tensors_of_one(outputs, inputs)
        op = _op_of(options, tensors)
        if op is None or not _are_alike(tensors):
            return self._plain.reduce_scatter(outputs, inputs, *given, **named)
        output, parts = outputs[0].data, [part.data for part in inputs[0]]

        def start(shared: SharedMemoryCommunicator) -> Work:
            # Whole group; [world_size * n] to [n], the tensors' dtype.
            whole = torch.cat([part.reshape(-1) for part in parts])
            return shared.reduce_scatter(output, whole, op)

        return self._issue(options, outputs, start, mean_of=[output])

    def _reduce_scatter_base(self, output: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        return self._scatter_sums([output], [tensor], given, named) or (
            self._plain._reduce_scatter_base(output, tensor, *given, **named)
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, *given: Any, **named: Any
    ) -> Any:
        """Reduce and scatter each tensor."""
        return self._scatter_sums(outputs, inputs, given, named) or (
            self._plain.reduce_scatter_tensor_coalesced(outputs, inputs, *given, **named)
        )

    # The names since torch 2.13.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_sums(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Any, named: Any
    ) -> LaneOperation | None:
        options = _options_of(c10d.ReduceScatterOptions, given, named)
        op = _op_of(options, [*outputs, *inputs])
        if op is None or not _are_parts(outputs, inputs, self.size()):
            return None
        combine: ReduceOp = op
        parts, wholes = [t.data for t in outputs], [t.data for t in inputs]

        def start(shared: SharedMemoryCommunicator) -> Work:
            # Whole group; each [world_size * n] to [n], its own dtype; all in progress at once.
            pairs = zip(parts, wholes, strict=True)
            return AllOf([shared.reduce_scatter(part, whole, combine) for part, whole in pairs])

        return self._issue(options, outputs, start, mean_of=parts)

    # -- copies -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, *given: Any, **named: Any) -> Any:
        options = _options_of(c10d.BroadcastOptions, given, named)
        fits = _are_lists(tensors) and len(tensors) == 1 and _can_copy(tensors)
        if options is None or not fits or not 0 <= options.rootRank < self.size():
            return self._plain.broadcast(tensors, *given, **named)
        tensor, root = tensors[0].data, options.rootRank
        # Whole group; [numel], the tensor's dtype.
        return self._issue(options, tensors, lambda shared: shared.broadcast(tensor, root))

    def allgather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        options = _options_of(c10d.AllgatherOptions, given, named)
        tensors = self._tensors_of_one(inputs, outputs)
        if options is None or not _can_copy(tensors) or not _are_alike(tensors):
            return self._plain.allgather(outputs, inputs, *given, **named)
        tensor, parts = inputs[0].data, [part.data for part in outputs[0]]

        def start(shared: SharedMemoryCommunicator) -> Work:
            # Whole group; [n] to [world_size * n], the tensor's dtype.
            whole = tensor.new_empty(len(parts) * tensor.numel())
            shared.all_gather(whole, tensor).wait()
            for part, got in zip(parts, whole.view(len(parts), -1), strict=True):
                part.copy_(got.view(part.shape))
            return Done()

        return self._issue(options, outputs[0], start)

    def _allgather_base(self, output: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        return self._gather([output], [tensor], given, named) or (
            self._plain._allgather_base(output, tensor, *given, **named)
        )

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, *given: Any, **named: Any
    ) -> Any:
        """Gather each tensor."""
        return self._gather(outputs, inputs, given, named) or (
            self._plain.allgather_into_tensor_coalesced(outputs, inputs, *given, **named)
        )

    # The names since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Any, named: Any
    ) -> LaneOperation | None:
        options = _options_of(c10d.AllgatherOptions, given, named)
        fits = _can_copy([*outputs, *inputs]) and _are_parts(inputs, outputs, self.size())
        if options is None or not fits:
            return None
        wholes, parts = [t.data for t in outputs], [t.data for t in inputs]

        def start(shared: SharedMemoryCommunicator) -> Work:
            # Whole group; each [n] to [world_size * n], its own dtype; all in progress at once.
            pairs = zip(wholes, parts, strict=True)
            return AllOf([shared.all_gather(whole, part) for whole, part in pairs])

        return self._issue(options, outputs, start)

    def barrier(self, *given: Any, **named: Any) -> Any:
        options = _options_of(c10d.BarrierOptions, given, named)
        if options is None or options.device_ids:
            return self._plain.barrier(*given, **named)

        def start(shared: SharedMemoryCommunicator) -> Work:
            shared.barrier()
            return Done()

        return self._issue(options, [], start)

    # -- issuing and ending -----------------------------------------------------------------------

    def _tensors_of_one(self, one: Any, lists: Any) -> list[Tensor]:
        """All tensors of a single operation; [] for several operations, left to torch's methods."""
        if not _are_lists(one, lists, *lists) or not len(one) == len(lists) == 1:
            return []
        return [*one, *lists[0]] if len(lists[0]) == self.size() else []

    def _issue(
        self,
        options: Any,
        result: Sequence[Tensor],
        start: Callable[[SharedMemoryCommunicator], Work],
        *,
        mean_of: Sequence[Tensor] = (),
    ) -> LaneOperation:
        """Queue the operation that `start` issues, with `result` for torch's `Work`; `mean_of` is
        divided by the number of ranks at the end if torch's `options` ask for a mean."""
        is_mean = bool(mean_of) and options.reduceOp == dist.ReduceOp.AVG
        seconds = options.timeout.total_seconds()

        def act(shared: SharedMemoryCommunicator) -> None:
            start(shared).wait()
            for tensor in mean_of if is_mean else ():
                tensor.div_(self.size())

        return self._lane.issue(
            act,
            list(result),
            timeout_s=seconds if seconds > 0 else None,  # None: the group's timeout
            at_once=not options.asyncOp,
        )

    def shutdown(self) -> None:
        """Finish all issued operations; part of `destroy_process_group`."""
        self._lane.close()
        wait_until_workers_sleep()
        super().shutdown()

    def abort(self) -> None:
        """Make the operations in progress fail; from any thread."""
        self._lane.abort()
        super().abort()


def _options_of(kind: type, given: Sequence[object], named: Mapping[str, object]) -> Any:
    """Torch's options, of class `kind`, in the arguments after the tensors, or their defaults;
    None for another overload, such as `group.allreduce(tensor, op, time)`."""
    options = [*given, *named.values()]
    if not options:
        return kind()
    return options[0] if len(options) == 1 and isinstance(options[0], kind) else None


def _are_lists(*given: object) -> bool:
    """Whether tensors come in lists, as torch's functions pass them; other overloads are gloo's."""
    return all(isinstance(each, list | tuple) for each in given)


def _op_of(options: Any, tensors: Sequence[Tensor]) -> ReduceOp | None:
    """The operation that combines `tensors` (a mean is a sum, divided by the caller); None: gloo
    does it, or raises the error."""
    if options is None:
        return None
    chosen = options.reduceOp
    kinds = _FLOATS if chosen == dist.ReduceOp.AVG else _NUMBERS
    return _OPS.get(chosen.op) if _all_plain(tensors, kinds) else None


def _can_copy(tensors: Sequence[Tensor]) -> bool:
    """Whether shared memory can move the tensors."""
    return _all_plain(tensors, _MOVABLE)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all have one size and dtype; uneven lists are left to gloo."""
    first = tensors[0]
    return all(t.numel() == first.numel() and t.dtype == first.dtype for t in tensors)


def _are_parts(parts: Sequence[Tensor], wholes: Sequence[Tensor], world_size: int) -> bool:
    """Whether each of `wholes` is [world_size * n] for [n] of `parts`; else gloo says why not."""
    return len(wholes) == len(parts) and all(
        whole.numel() == world_size * part.numel() and whole.dtype == part.dtype
        for whole, part in zip(wholes, parts, strict=True)
    )


def _all_plain(tensors: Sequence[Tensor], dtypes: set[torch.dtype]) -> bool:
    """Whether all are dense CPU tensors of `dtypes`; subclasses need torch's own operations."""
    return bool(tensors) and all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in dtypes
        for tensor in tensors
    )
