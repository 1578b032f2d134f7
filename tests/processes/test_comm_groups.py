"""Groups and reductions in real sessions: right, and nothing is left at the session's end."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm.groups import group
from gradsync.comm.reductions import ALGORITHMS, all_reduce
from gradsync.errors import ConfigError, RunError
from gradsync.world import World
from support.comm_cases import check_all, rank_input
from support.rank_session import open_session


def _pretend(world: World, nodes: list[int]) -> World:
    """The same rank, as if the hosts were other ones."""
    node = nodes[world.rank]
    return replace(
        world,
        node_rank=node,
        num_nodes=max(nodes) + 1,
        local_rank=nodes[: world.rank].count(node),
        local_world_size=nodes.count(node),
    )


def _arbitrary(rank: int, world_size: int, store_path: str) -> Any:
    with open_session(rank, world_size, store_path, timeout_s=45.0):
        found: list[Any] = []
        for ranks in ([0, 1], [2, 0], [1], [2, 1, 0]):
            comm = group(ranks)
            if comm is None:
                found.append(None)
                continue
            total = torch.tensor([10**rank])
            comm.all_reduce(total).wait()
            found.append((comm.rank, comm.world_size, int(total)))
            if comm.world_size > 1:
                backend = comm.group._get_backend(torch.device("cpu"))  # type: ignore[attr-defined]
                assert backend.options._timeout.total_seconds() == 45
            if ranks == [2, 0]:
                with pytest.raises(RunError, match=r"rank 0: .* int32 .* rank 1: .* float32 \[3\]"):
                    comm.all_reduce(torch.ones(3, dtype=torch.float32 if rank else torch.int32))
        for wrong in ([], [0, 0], [3], [-1, 0]):
            with pytest.raises(ConfigError, match=r"a group needs ranks of 0\.\.2, each once"):
                group(wrong)
        return found


def test_arbitrary_groups(pool: Any) -> None:
    assert pool.run(_arbitrary, 3) == [
        [(0, 2, 11), (0, 2, 101), None, (0, 3, 111)],
        [(1, 2, 11), None, (0, 1, 10), (1, 3, 111)],
        [None, (1, 2, 101), None, (2, 3, 111)],
    ]


def _keep_after_the_end(rank: int, world_size: int, store_path: str, rounds: int) -> bool:
    """Groups that are kept past the session keep nothing alive but the object itself."""
    kept = []
    for i in range(rounds):
        with open_session(rank, world_size, f"{store_path}{i}") as world:
            made = [comm for comm in (group([0, 1]), group([2, 3])) if comm is not None]
            for _ in range(20):
                place = _pretend(world, [0, 0, 1, 1])
                all_reduce(torch.ones(100), algorithm="hierarchical", world=place)
                made[0].all_reduce(torch.ones(3)).wait()
            kept += made
        assert not dist.is_initialized()
    del made
    kept.clear()
    gc.collect()
    return True


def test_groups_do_not_outlive_the_session_nor_hang_it(pool: Any) -> None:
    """The pool's workers look for sockets, threads and process groups left behind."""
    assert pool.run(_keep_after_the_end, 4, 5) == [True] * 4


def _error_with_groups(rank: int, world_size: int, store_path: str) -> str:
    try:
        with open_session(rank, world_size, store_path) as world:
            if rank == 3:
                raise ValueError("rank 3 has had enough")
            for _ in range(1000):
                place = _pretend(world, [0, 0, 1, 1])
                all_reduce(torch.ones(100), algorithm="hierarchical", world=place)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_reaches_ranks_that_wait_in_a_group(pool: Any) -> None:
    found = pool.run(_error_with_groups, 4)
    assert found[3] == "ValueError: rank 3 has had enough"
    for message in found[:3]:
        assert message.startswith("PeerError: rank 3")


def _public(rank: int, world_size: int, store_path: str) -> Any:
    found = {}
    with open_session(rank, world_size, store_path) as world:
        place = _pretend(world, [0, 0, 1][:world_size])
        for name in ALGORITHMS:
            for op in ("sum", "mean", "min", "max"):
                tensor = rank_input(rank, 100, torch.float32)
                needs = {"world": place} if name == "hierarchical" else {}
                result = all_reduce(tensor, op, algorithm=name, **needs)  # type: ignore[arg-type]
                assert result is tensor
                found[name, op] = result
        if world_size > 1:
            with pytest.raises(ConfigError, match="must know the nodes: give world="):
                all_reduce(torch.ones(1), algorithm="hierarchical")
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_default_group_by_every_algorithm(pool: Any, world_size: int) -> None:
    by_rank = pool.run(_public, world_size)
    for name, op in by_rank[0]:
        results = [found[name, op] for found in by_rank]
        if op == "mean":
            sums = [found[name, "sum"] for found in by_rank]
            for result, total in zip(results, sums, strict=True):
                assert torch.equal(result, total / world_size)
        else:
            check_all(results, op)
