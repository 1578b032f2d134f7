"""What only GPUs reach, as far as a CPU shows it: groups, messages and limits of time.

`tests/gpu/` runs the same paths over NCCL.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradsync as gs
from gradsync.comm import process_group
from gradsync.comm.groups import with_cpu_group
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.core import torch_private
from gradsync.runtime.device import check_not_shared, device_identity
from gradsync.sync.buckets import UNKNOWN, at_once, checked_shares, largest_nodes, merges_of, root
from gradsync.sync.build import publishes_later
from gradsync.sync.options import Recipe
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.tree_exchange import TreeExchange
from support.fork_server import run_forked, torch_ranks
from support.rank_session import open_session
from support.sync_cases import Layers
from support.thread_ranks import run_thread_ranks


def test_a_background_thread_takes_its_streams_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on GPU 0, and torch opens a context there when a stream is left."""
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    worker = process_group._Worker(SimpleNamespace(device=torch.device("cuda", 1)))
    worker.jobs.put(None)
    worker.run()
    assert taken == [torch.device("cuda", 1)]


def test_the_step_begins_without_the_device() -> None:
    """Ranks tell their numbers of leaves on the CPU, whatever device gradients are on."""

    class Recorded:
        rank, world_size = 0, 2

        def exchange(self, sends: Any, receives: Any, channel: int = 0, /) -> Any:
            seen.extend(tensor.device.type for tensor, _ in (*sends, *receives))
            return process_group.Done()

    seen: list[str] = []
    comm: Any = Recorded()
    exchange = TreeExchange(comm, [comm], torch.device("meta"))
    # What was not received is no leaf: a group that was aborted leaves its tensors as they were.
    assert exchange._share((3, 5), 0) == [(3, 5), (0, 0)]
    assert seen == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("asked", "device", "later"),
    [
        *((True, "cuda", True), (True, "cpu", True), ("auto", "cpu", True)),
        *(("auto", "cuda", False), (False, "cpu", False), (False, "cuda", False)),
    ],
)
def test_sums_are_handed_out_late_on_gpus_if_asked_for(
    asked: Any, device: str, later: bool
) -> None:
    recipe = replace(Recipe(), overlap_publish=asked)
    assert publishes_later(recipe, torch.device(device)) is later


def test_ranks_may_share_a_gpu_where_nccl_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks where host and GPU are equal, and takes NCCL_HOSTID for the host."""
    properties = SimpleNamespace(uuid="GPU-a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    each = [device_identity("cuda:0", host_id) for host_id in ("gs-0", "gs-1", "gs-1")]
    check_not_shared(["h0"] * 2, each[:2])
    with pytest.raises(gs.LaunchError, match=r"ranks 1 and 2 share one GPU \(GPU-a of gs-1\)"):
        check_not_shared(["h0"] * 3, each)


def test_sums_of_all_groups_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort may wait for another group's kernels: these wait for each other."""
    both = threading.Barrier(2, timeout=20)
    aborted: list[int] = []

    def made(*kinds: str) -> Any:
        types = [SimpleNamespace(type=kind) for kind in kinds]
        return SimpleNamespace(_device_types=types, abort=lambda: aborted.append(both.wait()))

    groups = [made("cpu", "cuda"), made("cpu"), made("cpu", "cuda")]
    monkeypatch.setattr(torch_private, "process_groups", lambda: groups)
    torch_private.abort_nccl()
    assert sorted(aborted) == [0, 1]


def test_a_limit_of_one_backend() -> None:
    def work(_: int, group: Any) -> timedelta:
        torch_private.set_timeout(group, "cpu", timedelta(seconds=77))
        return torch_private.timeout_of(group)

    assert run_thread_ranks(work, 1) == [timedelta(seconds=77)]


def groups_of_handles(rank: int, world_size: int, store_path: str) -> list[int]:
    """Process groups before, with and after handles, and after one that outlives its session."""
    with open_session(rank, world_size, store_path) as world:
        counts = [len(torch_private.process_groups())]
        for sync in 2 * ["invariant", "bucketed", "hierarchical"]:
            options = {"strategy": sync, "collective": "backend"}
            handle = gs.replicate(nn.Linear(3, 2), world, **options)
            counts.append(len(torch_private.process_groups()))
            handle.close()
            counts.append(len(torch_private.process_groups()))
        last = gs.replicate(nn.Linear(3, 2), world, collective="backend")
    last.close()
    return counts


def test_a_closed_handle_leaves_no_group(pool: Any) -> None:
    counts, others = pool.run(groups_of_handles, 2)
    assert counts == others
    assert counts[1] == counts[0] + 1  # the two ranks' own
    assert counts[::2] == counts[:1] * len(counts[::2])


def small_messages(rank: int, world_size: int, store_path: str) -> tuple[int, float, int]:
    """Groups with a handle, and a sum of two ranks on it, where the default group takes GPUs'
    tensors alone."""
    with open_session(rank, world_size, store_path) as world:
        main, kinds = dist.group.WORLD, torch_private.device_types
        alone = {"device_types": lambda group: ["cuda"] if group is main else kinds(group)}
        with (
            patch.multiple("gradsync.comm.groups", **alone),
            patch.multiple(torch_private, **alone),
        ):
            comm = with_cpu_group(ProcessGroupCommunicator(main))
            made = len(torch_private.process_groups())
            comm.all_reduce(total := torch.ones(1)).wait()
            comm.broadcast(total).wait()
            comm.all_gather(torch.zeros(2), total).wait()
            comm.reduce_scatter(torch.zeros(1), torch.ones(2)).wait()
            other = torch.zeros(1)
            comm.exchange([(total, 1 - rank)], [(other, 1 - rank)]).wait()
            assert torch.equal(total, other)
            comm.close()
        comm = ProcessGroupCommunicator(main)
        assert with_cpu_group(comm) is comm
        assert world.world_size == 2
        return made, total.item(), len(torch_private.process_groups())


def test_small_messages_do_not_go_by_the_gpu(pool: Any) -> None:
    """They would wait for all that the device has to do."""
    assert pool.run(small_messages, 2) == [(2, 2.0, 1)] * 2


FAILS = """
from dataclasses import replace
import torch
import gradsync as gs

session = gs.init(device="cpu", threads=1)
with session as world:
    session._world = replace(world, device_name="cuda:0")  # whose groups are aborted
    torch.distributed.barrier()
    if world.rank == 1:
        raise ValueError("mine")
    torch.distributed.barrier()
"""


def test_a_failure_is_said_after_the_groups_were_aborted(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(FAILS)
    first, second = run_forked([script], torch_ranks(2))
    assert "AssertionError" not in first.stderr + second.stderr
    assert "PeerError" in first.stderr
    assert "ValueError: mine" in second.stderr
    assert first.returncode != 0 != second.returncode


def own_group(comm: Any, _: torch.device) -> ProcessGroupCommunicator:
    """A lane's group, as on GPUs."""
    made = dist.new_group(dist.get_process_group_ranks(comm.group))
    return ProcessGroupCommunicator(made, made=[made])


def gathered(rank: int, world_size: int, store_path: str) -> list[tuple[Any, list[str]]]:
    """Weights by halves and rounds, and by one exchange and one all-gather; and what was sent."""
    found, sent = [], []

    class Counting(ProcessGroupCommunicator):
        def exchange(self, *given: Any) -> Any:
            sent.append(("exchange", (*given[0], *given[1])[0][0].dtype))
            return super().exchange(*given)

        def all_gather(self, output: Any, tensor: Any) -> Any:
            sent.append(("all_gather", output.dtype))
            return super().all_gather(output, tensor)

    with open_session(rank, world_size, store_path) as world:
        for sync, late in (("invariant", False), ("invariant", True), ("zero1", False)):
            for as_on_gpus in (False, True):
                torch.manual_seed(0)
                model = Layers(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 2))
                how = {"gathers": lambda _, here=as_on_gpus: here}
                if as_on_gpus:
                    how["for_background"] = lambda comm, device: Counting(
                        (own := own_group(comm, device)).group, made=own._made
                    )
                options = {"collective": "backend", "bucket_mb": 0.001, "overlap_publish": late}
                with patch.multiple("gradsync.sync.build", **how):
                    handle = gs.replicate(model, world, strategy=sync, **options)
                optimizer = torch.optim.AdamW(model.parameters())
                for step in range(3):
                    for leaf in range(2 * rank, 2 * rank + 2 - rank % 2):
                        torch.manual_seed(100 * step + leaf)
                        handle.backward(
                            model(torch.randn(3, 5)).square().sum(), weight=3, reduction="sum"
                        )
                    handle.step(optimizer, clip_norm=0.1)
                weights = handle.replica.full_weights()
                handle.close()
                kinds = [kind for kind, dtype in sent if dtype == torch.float32]
                sent.clear()
                found.append(([weights[name].tolist() for name in sorted(weights)], kinds))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_calls_a_bucket_have_the_bits_of_many(pool: Any, world_size: int) -> None:
    """Inside a host of GPUs: one exchange, and one all-gather in place of rounds."""
    for found in pool.run(gathered, world_size):
        for (by_rounds, _), (by_two, _) in zip(found[::2], found[1::2], strict=True):
            assert by_rounds == by_two
        assert found[1][1] == ["exchange", "all_gather"] * (len(found[1][1]) // 2) != []


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_additions_at_once_are_those_of_the_tree(counts: list[int]) -> None:
    nodes = [
        node
        for leaves in checked_shares([(n, UNKNOWN) for n in counts])
        for node in largest_nodes(leaves)
    ]
    merges, (end,) = merges_of(nodes, [root(sum(counts))])
    values = torch.randn(len(nodes), generator=torch.Generator().manual_seed(0)).tolist()
    together = list(values)
    for left, right in merges:
        values[left] += values[right]
    for pairs in at_once(merges):
        assert len({place for pair in pairs for place in pair}) == 2 * len(pairs)
        for left, right in pairs:
            together[left] += together[right]
    assert sum(map(len, at_once(merges))) == len(merges)
    assert end < 0 or together[end] == values[end]


OURS = [name for name, strategy in STRATEGIES.items() if not strategy.needs_group]
"""Strategies whose collectives are gradsync's own; torch issues those of the others."""
LATE = [(name, True) for name in ("invariant", "zero1")]


def issued(
    rank: int, world_size: int, store_path: str, name: str, late: bool
) -> list[tuple[Any, ...]]:
    """Group, thread, operation and shapes of all that a rank issues in eight steps, in order."""
    found: list[tuple[Any, ...]] = []

    def noting(operation: str, run: Any) -> Any:
        def noted(self: Any, first: Any, *rest: Any) -> Any:
            group = self.group.group_name
            thread = threading.current_thread().name.partition("_")[0]
            if operation == "exchange":
                both = (first, rest[0])
                told = [[(t.numel(), str(t.dtype), peer) for t, peer in m] for m in both]
            else:
                told = (first.numel(), str(first.dtype), str(rest[1:]))
            found.append((group, thread, operation, told))
            return run(self, first, *rest)

        return noted

    kinds = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "exchange")
    noted = {kind: noting(kind, getattr(ProcessGroupCommunicator, kind)) for kind in kinds}
    as_on_gpus = {"for_background": own_group, "gathers": lambda _: True}
    as_on_gpus["group_of_pair"] = lambda _: None
    with (
        open_session(rank, world_size, store_path) as world,
        patch.multiple("gradsync.sync.build", **as_on_gpus),
        patch.multiple(ProcessGroupCommunicator, **noted),
    ):
        torch.manual_seed(0)
        model = Layers(nn.Linear(5, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 2))
        recipe = STRATEGIES[name].defaults
        options = {"collective": "backend"} if isinstance(recipe, Recipe) else {}
        options |= {"bucket_mb": 0.0002} if options and recipe.grouping == "buckets" else {}
        options |= {"overlap_publish": True} if late else {}
        handle = gs.replicate(model, world, strategy=name, batch_norm="local", **options)
        optimizer = torch.optim.AdamW(model.parameters())
        found.clear()
        for step in range(8):
            for leaf in range(2 * rank, 2 * rank + 2 - (rank + step) % 2):
                torch.manual_seed(100 * step + leaf)
                handle.backward(model(torch.randn(3, 5)).square().sum(), weight=3, reduction="sum")
            handle.step(optimizer, clip_norm=0.1)
        handle.close()
    return found


@pytest.mark.parametrize(("name", "late"), [*((name, False) for name in OURS), *LATE])
def test_a_group_is_one_threads_and_ranks_issue_the_same_on_it(
    pool: Any, name: str, late: bool
) -> None:
    """NCCL runs a group's collectives in the order in which each rank issues them."""
    by_rank = pool.run(issued, 2, name, late)
    for rank, calls in enumerate(by_rank):
        groups = {group for group, *_ in calls}
        assert len({(group, thread) for group, thread, *_ in calls}) == len(groups) > 0
        for _, _, operation, told in calls:
            if operation == "exchange":
                assert {peer for messages in told for *_, peer in messages} <= {1 - rank}
    first, second = ([(g, *rest) for g, _, *rest in calls] for calls in by_rank)
    for group in {group for group, *_ in first}:
        ours = [rest for g, *rest in first if g == group]
        theirs = [rest for g, *rest in second if g == group]
        for (operation, told), (its_operation, its_told) in zip(ours, theirs, strict=True):
            assert operation == its_operation
            if operation == "exchange":
                sent, received = ([m[:-1] for m in messages] for messages in told)
                its_sent, its_received = ([m[:-1] for m in messages] for messages in its_told)
                assert (sent, received) == (its_received, its_sent)
            else:
                assert told == its_told


def test_buffers_wait_for_sums_on_their_way_down(pool: Any) -> None:
    """Where these have a group of their own: NCCL wants one order of the kernels of both."""
    for calls in pool.run(issued, 2, "invariant", True):
        downs, steps = 0, 0
        for _, thread, operation, told in calls:
            downs += operation == "all_gather"
            if told[:2] == (60, "torch.int64"):  # what 30 means and variances have moved by
                steps += 1
                assert (thread, downs) == ("MainThread", 2 * steps)  # of two buckets
        assert steps == 8
