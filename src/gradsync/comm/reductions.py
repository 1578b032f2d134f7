"""What scripts call by themselves: `gs.all_reduce(tensor, "mean", algorithm="ring")`, and values of
all ranks, as results of an evaluation: `gs.gather(predictions)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator, ReduceOp
from gradsync.comm.groups import RankPlacement, communicator, levels_of, share_placement
from gradsync.comm.p2p_collectives import COMBINE, hierarchical_all_reduce, ring_all_reduce
from gradsync.comm.values import all_gather_json, call_site, check_same_call
from gradsync.core.files import check_name
from gradsync.errors import ConfigError
from gradsync.world import World

Op = Literal["sum", "mean", "min", "max"]
ALGORITHMS = ("backend", "ring", "hierarchical")


def all_reduce(
    tensor: Tensor,
    op: Op | dist.ReduceOp | dist.ReduceOp.RedOpType = "sum",
    algorithm: str = "backend",
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    world: World | None = None,
    hosts: RankPlacement | None = None,
) -> Tensor:
    """Combine `tensor` over all ranks, in place, and return it. Blocking, without autograd.

    All ranks call it with the same arguments and get the same bits. The bits of a sum depend on
    algorithm and number of ranks. First the ranks compare shape, dtype, device type, op, algorithm
    and `name`, by default the line of the call, so that two tensors are not swapped (one all-reduce
    of 16 bytes).

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
        algorithm: backend, the process group's own (2(N-1)/N S on its rings); ring, 2(N-1)/N S in
            2(N-1) steps, the fewest bytes; or hierarchical, 2(n-1)/n S inside the node and
            2(M-1)/M S/n between nodes (S for the tensor, N ranks, M nodes, n ranks per node).
        name: the same on all ranks for one reduction. None uses file, line and function of the
            call. Give a name if ranks call it from different lines, or for several tensors of one
            shape from one line (a loop whose order may differ).
        comm: the participating ranks; by default the ranks of `world`, or of the default process
            group, or this rank alone.
        world: this rank's world; tells `hierarchical` where the nodes are.
        hosts: from `share_placement`; saves `hierarchical` an all-gather.

    Raises:
        ConfigError: no tensor, unknown `op` or `algorithm`, unsupported dtype, nodes unknown.
        RunError: on all ranks, when they call different reductions.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise ConfigError(f"all_reduce works in place on a tensor; got {kind}: use torch.tensor")
    given = getattr(op, "op", op)  # a ReduceOp holds its RedOpType, which has a name
    word = str(getattr(given, "name", given)).lower()
    word = "mean" if word == "avg" else word
    check_name("op", word, get_args(Op))
    check_name("algorithm", algorithm, ALGORITHMS)
    comm = communicator(world) if comm is None else getattr(comm, "unchecked", comm)
    where = call_site() if name is None else f"named {name!r}"
    # Before any refusal that this rank alone may make: the others would wait for it.
    check_same_call(comm, f"all_reduce ({word}, {algorithm})", tensor, where)
    sums = cast("ReduceOp", "sum" if word == "mean" else word)
    _try_alone(tensor, sums, word, algorithm)
    # The tensor itself if possible. A pending conjugation or negation is not part of the memory
    # that is sent, although the tensor counts as contiguous.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if algorithm == "backend":
        comm.all_reduce(flat, sums).wait()  # all of `comm`, the tensor's shape; overlaps nothing
    elif algorithm == "ring":
        ring_all_reduce(comm, flat, sums)
    else:
        if hosts is None and world is None and comm.world_size > 1:
            raise ConfigError("algorithm='hierarchical' must know the nodes: give world=")
        hosts = hosts or share_placement(comm, world or World())
        intra, inter, equal_nodes = levels_of(comm, hosts)
        hierarchical_all_reduce(intra, inter, flat, sums, equal_nodes=equal_nodes)
    if word == "mean":
        flat.div_(comm.world_size)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
    return tensor


def _try_alone(tensor: Tensor, op: ReduceOp, word: str, algorithm: str) -> None:
    """Raise ConfigError if torch cannot combine two such tensors: it would raise in the middle of
    an algorithm on some ranks, while others wait. A backend raises at once, on all ranks alike."""
    said = f"all_reduce with algorithm={algorithm!r}, op={word!r} does not take {tensor.dtype}"
    if tensor.layout != torch.strided:
        raise ConfigError(f"{said} in {tensor.layout}: only dense tensors travel; use to_dense()")
    try:
        one = torch.ones(1, dtype=tensor.dtype, device=tensor.device)
        if algorithm != "backend":
            COMBINE[op](one, one)
        if word == "mean":
            one.div_(1)
    except (RuntimeError, TypeError) as error:  # TypeError from torch 2.15 on
        raise ConfigError(f"{said}: {str(error).splitlines()[0]}; convert it") from None


def gather(
    value: Any,
    *,
    name: str | None = None,
    comm: Communicator | None = None,
    world: World | None = None,
) -> Any:
    """Every rank's `value`, on every rank, in rank order. Blocking, without autograd.

    All ranks call it, on one rank too. After `gs.eval_loader` the result has the data set's order.

    Args:
        value: a tensor, [n, ...], where n may differ between ranks (0 too), or []; or numbers,
            strings, None, and lists, tuples and dicts of these.
        name: as for `gs.all_reduce`: give one if ranks call it from different lines.
        comm: the ranks; by default those of `world`, or of the default process group, or this rank
            alone.
        world: this rank's world.

    Returns:
        The tensors concatenated, [sum of n, ...], or stacked, [W], on the device of `value`. Of
        other values a list of W; tuples in them become lists.

    Raises:
        ConfigError: on all ranks: a value that is neither; tensors of different dtypes or shapes
            (behind n), or a tensor on some ranks only.
        RunError: on all ranks, when they make different calls.
    """
    comm = communicator(world) if comm is None else getattr(comm, "unchecked", comm)
    where = call_site() if name is None else f"named {name!r}"
    check_same_call(comm, "gather", torch.empty(0), where)
    if isinstance(value, Tensor):
        mine = {"dtype": str(value.dtype), "rest": list(value.shape[1:]), "dims": value.ndim}
        mine |= {"n": len(value) if value.ndim else 1}
        refused = "sparse tensors: use to_dense()" if value.layout != torch.strided else ""
    else:
        mine, refused = {"value": value}, _unfit(value)
    # Whole group, two all-gathers: int64 [1], uint8 [longest]; overlaps nothing.
    everyone = all_gather_json(comm, {"refused": refused} if refused else mine)
    for rank, one in enumerate(everyone):
        if "refused" in one:
            raise ConfigError(f"gs.gather cannot take what rank {rank} has: {one['refused']}")
        if {**one, "n": 0, "value": 0} != {**everyone[0], "n": 0, "value": 0}:
            raise ConfigError(
                f"gs.gather: rank {rank} has {_described(one)}, rank 0 {_described(everyone[0])}; "
                "only the first dimension may differ"
            )
    if not isinstance(value, Tensor):
        return [one["value"] for one in everyone]
    counts = [one["n"] for one in everyone]
    return _gather_tensor(comm, value.detach(), counts)


def _gather_tensor(comm: Communicator, value: Tensor, counts: list[int]) -> Tensor:
    rows = value.resolve_conj().resolve_neg().reshape(counts[comm.rank], *value.shape[1:])
    rest, most = rows.shape[1:], max(counts)
    padded = torch.zeros(most, *rest, dtype=value.dtype, device=value.device)
    padded[: len(rows)] = rows
    mine = padded.reshape(-1).view(torch.uint8)  # any dtype can be sent, bits unchanged
    found = torch.empty(comm.world_size * mine.numel(), dtype=torch.uint8, device=value.device)
    if mine.numel():
        # Whole group, uint8 [bytes of the longest], on the value's device; overlaps nothing.
        comm.all_gather(found, mine).wait()
    parts = found.view(value.dtype).reshape(comm.world_size, most, *rest)
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])


def _unfit(value: Any) -> str:
    """Why `value` would not come back as it is from JSON; "" if it would."""
    inner: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        inner = value
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        inner = value.values()
    elif value is not None and not isinstance(value, bool | int | float | str):
        return (
            f"a {type(value).__name__}; it takes a tensor, or numbers, strings, lists and dicts "
            "with strings as keys"
        )
    return next(filter(None, map(_unfit, inner)), "")


def _described(one: Mapping[str, Any]) -> str:
    if "dtype" not in one:
        return "no tensor"
    shape = [one["n"], *one["rest"]] if one["dims"] else []
    return f"{one['dtype'].removeprefix('torch.')} {shape}"
