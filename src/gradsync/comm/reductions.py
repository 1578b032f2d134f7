"""All-reduce by any algorithm, usable alone: `gs.all_reduce(tensor, "mean", algorithm="ring")`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator, Messenger, ReduceOp
from gradsync.comm.groups import Groups, Subset, default_communicator, share_placement
from gradsync.comm.p2p_collectives import hierarchical_all_reduce, ring_all_reduce
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.comm.shared_memory.hierarchy import all_reduce_over_hosts
from gradsync.comm.values import call_site, check_same_call
from gradsync.core.files import check_name
from gradsync.errors import ConfigError
from gradsync.world import World

Op = Literal["sum", "mean", "min", "max"]

_OF_GLOO = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
}
"""Dtypes that Gloo's all-reduce adds. Other backends raise their own errors, alike on all ranks."""
_COMBINED = {*_OF_GLOO, torch.int16}
"""Dtypes that the other algorithms combine: torch 2.15 has no sums for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionSite:
    """The ranks of one all-reduce, and their placement."""

    comm: Communicator
    """Communicator over all of them."""
    world: World | None = None
    """This rank's place, if the caller gave it."""
    groups: Groups | None = None
    """Groups for two levels, if the caller has made them."""

    def levels(self, device: torch.device) -> tuple[Messenger, Messenger, bool]:
        """The ranks of this node, this rank's counterparts on the other nodes, and `equal_nodes`.

        Without groups: one all-gather over `comm`, int64 [2] on `device`, then messages over `comm`
        itself. ConfigError if neither groups nor a world was given.
        """
        if self.groups is not None:
            return self.groups.intra, self.groups.inter, self.groups.equal_nodes
        if self.comm.world_size == 1:
            return self.comm, self.comm, True
        if self.world is None:
            raise ConfigError(
                "algorithm='hierarchical' must know the nodes: give world=, or groups=groups(world)"
            )
        found = share_placement(self.comm, self.world, device)
        node, column = found.node_of(self.comm.rank), found.column_of(self.comm.rank)
        return Subset(self.comm, node), Subset(self.comm, column), found.equal_nodes


def _backend(site: ReductionSite, tensor: Tensor, op: ReduceOp) -> None:
    site.comm.all_reduce(tensor, op).wait()  # all of `comm`, the tensor's shape; overlaps nothing


def _ring(site: ReductionSite, tensor: Tensor, op: ReduceOp) -> None:
    ring_all_reduce(site.comm, tensor, op)


def _hierarchical(site: ReductionSite, tensor: Tensor, op: ReduceOp) -> None:
    intra, inter, equal_nodes = site.levels(tensor.device)
    if isinstance(intra, SharedMemoryCommunicator) and tensor.device.type == "cpu":
        all_reduce_over_hosts(intra, inter, tensor, op, equal_nodes=equal_nodes)
    else:
        hierarchical_all_reduce(intra, inter, tensor, op, equal_nodes=equal_nodes)


# By the name that users type, with the bytes that a rank sends: S for the tensor, N ranks, M nodes,
# n ranks per node. Each works in place, blocking, on a contiguous tensor without autograd.
ALGORITHMS: dict[str, Callable[[ReductionSite, Tensor, ReduceOp], None]] = {
    "backend": _backend,  # the process group's; 2(N-1)/N S on its rings
    "ring": _ring,  # 2(N-1)/N S in 2(N-1) steps: fewest bytes
    "hierarchical": _hierarchical,  # 2(n-1)/n S inside the node, 2(M-1)/M S/n between nodes
}


def all_reduce(
    tensor: Tensor,
    op: Op | dist.ReduceOp | dist.ReduceOp.RedOpType = "sum",
    algorithm: str = "backend",
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    world: World | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """Combine `tensor` over all ranks, in place, and return it. Blocking, without autograd.

    All ranks call it with the same arguments and get the same bits. The bits of a sum depend on
    algorithm and number of ranks. First the ranks compare shape, dtype, device type, op, algorithm
    and `name`, by default the line of the call, so that two tensors are not swapped (one all-reduce
    of 16 bytes). Unsupported combinations are refused before the tensor is sent.

        dtype                                            ops                  algorithms
        float64, float32, float16, bfloat16              sum, mean, min, max  all
        int64, int32, int8, uint8 (wrap around)          sum, min, max        all
        int16 (wraps around)                             sum, min, max        all but Gloo's own
        bool (its sum is `or`)                           sum, min, max        all
        complex                                          sum, mean            all
        float8, uint16, uint32, uint64; sparse tensors   none                 (NCCL: some)

    The min or max with a NaN on some rank is NaN; with Gloo's `backend` it depends on the rank.

    Args:
        tensor: dense, same shape and dtype on all ranks; copied if not contiguous.
        op: sum, mean (the sum divided by the number of ranks), min or max; or torch's `ReduceOp`
            SUM, AVG, MIN or MAX.
        algorithm: backend, ring or hierarchical.
        name: the same on all ranks for one reduction. None uses file, line and function of the
            call. Give a name if ranks call it from different lines, or for several tensors of one
            shape from one line (a loop whose order may differ).
        comm: the participating ranks; by default the ranks of `world`, or of the default process
            group, or this rank alone.
        world: this rank's world; tells `hierarchical` where the nodes are.
        groups: made by `groups(world)`; saves `hierarchical` an all-gather. With a communicator
            from `share_hosts` as `intra`, nodes add up in shared memory.

    Raises:
        ConfigError: no tensor, unknown `op` or `algorithm`, unsupported dtype, nodes unknown.
        RunError: on all ranks, when they call different reductions.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise ConfigError(f"all_reduce works in place on a tensor; got {kind}: use torch.tensor")
    op = _named_op(op)
    check_name("algorithm", algorithm, ALGORITHMS)
    comm = default_communicator(world) if comm is None else getattr(comm, "unchecked", comm)
    where = call_site() if name is None else f"named {name!r}"
    # Before any refusal that this rank alone may make: the others would wait for it.
    check_same_call(comm, f"all_reduce ({op}, {algorithm})", tensor, where)
    _reduce(ReductionSite(comm=comm, world=world, groups=groups), tensor, op, algorithm)
    return tensor


def _reduce(site: ReductionSite, tensor: Tensor, op: Op, algorithm: str) -> None:
    check_supported(site.comm, tensor, op, algorithm)
    # The tensor itself if possible. A pending conjugation or negation is not part of the memory
    # that is sent, although the tensor counts as contiguous.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    ALGORITHMS[algorithm](site, flat, "sum" if op == "mean" else op)
    if op == "mean":
        flat.div_(site.comm.world_size)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)


def check_supported(comm: Communicator, tensor: Tensor, op: Op, algorithm: str) -> None:
    """Refuse tensors that cannot be combined, without a message: equal tensors agree.

    Runs before the first message: later, one rank would fail midway and the others wait.

    Raises:
        ConfigError: with algorithm, op and dtype.
    """
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"the mean of {tensor.dtype} would be cut off; use op='sum' and divide, or convert it"
        )
    reason = _refusal(comm, tensor, op, algorithm)
    if reason is not None:
        kind = "" if tensor.layout == torch.strided else f" in {tensor.layout}"
        raise ConfigError(
            f"all_reduce with algorithm={algorithm!r}, op={op!r} does not take "
            f"{tensor.dtype}{kind}: {reason}"
        )


def _refusal(comm: Communicator, tensor: Tensor, op: Op, algorithm: str) -> str | None:
    if tensor.layout != torch.strided:
        return "only dense tensors travel; use tensor.to_dense()"
    if tensor.is_complex() and op in ("min", "max"):
        return "complex numbers have no order; reduce a real tensor, such as tensor.abs()"
    if algorithm != "backend":
        return None if tensor.dtype in _COMBINED else "this algorithm cannot add it; convert it"
    if tensor.dtype not in _OF_GLOO and isinstance(comm, ProcessGroupCommunicator):
        return "Gloo cannot; convert it" if comm.backend_for(tensor.device) == "gloo" else None
    return None


def _named_op(op: Any) -> Op:
    """This module's name for torch's or the user's `op`."""
    given = getattr(op, "op", op)  # a ReduceOp holds its RedOpType, which has a name
    given = getattr(given, "name", given)
    word = "mean" if str(given).lower() == "avg" else str(given).lower()
    if word not in get_args(Op):
        check_name("op", str(given), get_args(Op))
    return cast("Op", word)
