"""Values of all ranks, as results of an evaluation: `gs.gather(predictions)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.groups import default_communicator
from gradsync.comm.values import all_gather_json, call_site, check_same_call
from gradsync.errors import ConfigError
from gradsync.world import World


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
    comm = default_communicator(world) if comm is None else getattr(comm, "unchecked", comm)
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
