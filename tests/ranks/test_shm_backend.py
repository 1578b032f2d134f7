"""The process group `shm` against gloo's, operation by operation, on ranks as threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from gradsync.backends import group as module
from gradsync.backends.group import NAME, SharedMemoryGroup, create
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.comm.shared_memory.choose import share_memory
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.errors import LostPeerError, RunError
from support.comm_cases import FLOATS, INTEGERS, rank_input
from support.shm_ranks import Ranks, given, on_ranks
from support.thread_ranks import run_thread_ranks

OPS = dist.ReduceOp
LONG = 300_001  # more than one of the small buffers


Operation = Callable[[Any, int, int], list[Tensor]]
"""(group, rank, world size) -> tensors with the result."""


def all_reduce(length: int, dtype: torch.dtype, op: Any) -> Operation:
    def run(group: Any, rank: int, _: int) -> list[Tensor]:
        tensor = rank_input(rank, length, dtype)
        group.allreduce([tensor], given(c10d.AllreduceOptions, reduceOp=op)).wait()
        return [tensor]

    return run


def coalesced(group: Any, rank: int, world_size: int) -> list[Tensor]:
    sums = [rank_input(rank, n, torch.float32) for n in (7, 1000)]
    group.allreduce_coalesced(sums, given(c10d.AllreduceCoalescedOptions)).wait()
    parts = [rank_input(rank, n, torch.int64) for n in (3, 5)]
    wholes = [torch.zeros(world_size * len(part), dtype=torch.int64) for part in parts]
    group.allgather_into_tensor_coalesced(wholes, parts).wait()
    inputs = [rank_input(rank, world_size * n, torch.int32) for n in (2, 9)]
    outputs = [torch.zeros(n, dtype=torch.int32) for n in (2, 9)]
    group.reduce_scatter_tensor_coalesced(outputs, inputs, given(c10d.ReduceScatterOptions)).wait()
    return [*sums, *wholes, *outputs]


def strided(group: Any, rank: int, world_size: int) -> list[Tensor]:
    """Gloo adds up what lies there, whatever the strides; so it gets contiguous ones."""
    tensor = rank_input(rank, 2000, torch.float32).view(40, 50)
    view = tensor.t() if rank else tensor.t().contiguous()  # ranks may differ
    every_other = rank_input(rank, 64, torch.float32)[::2]
    if type(group) is dist.ProcessGroup:
        view, every_other = view.contiguous(), every_other.contiguous()
    group.allreduce([view]).wait()
    group.broadcast([every_other], given(c10d.BroadcastOptions, rootRank=1)).wait()
    return [view.contiguous(), every_other.contiguous()]


def broadcasts(group: Any, rank: int, world_size: int) -> list[Tensor]:
    tensors = [rank_input(rank, LONG, torch.bfloat16), torch.tensor([rank == 1]), torch.zeros(0)]
    for tensor in tensors:
        options = given(c10d.BroadcastOptions, rootRank=world_size - 1)
        group.broadcast([tensor], options).wait()
    return tensors


def gathers(group: Any, rank: int, world_size: int) -> list[Tensor]:
    mine = rank_input(rank, 6, torch.float16).view(2, 3)
    listed = [torch.zeros(2, 3, dtype=torch.float16) for _ in range(world_size)]
    group.allgather([listed], [mine]).wait()
    whole = torch.zeros(world_size * 2, 3, dtype=torch.float16)
    group._allgather_base(whole, mine).wait()
    in_place = torch.zeros(world_size, LONG, dtype=torch.int64)
    in_place[rank] = rank_input(rank, LONG, torch.int64)
    group._allgather_base(in_place, in_place[rank : rank + 1]).wait()
    return [*listed, whole, in_place]


def scatters(op: Any) -> Operation:
    def run(group: Any, rank: int, world_size: int) -> list[Tensor]:
        options = given(c10d.ReduceScatterOptions, reduceOp=op)
        listed = [rank_input(world_size * rank + i, 6, torch.float32) for i in range(world_size)]
        results = [torch.zeros(2, 3), torch.zeros(70_001)]
        group.reduce_scatter(results[:1], [[part.view(2, 3) for part in listed]], options).wait()
        whole = rank_input(rank, world_size * 70_001, torch.float32)
        group._reduce_scatter_base(results[1], whole, options).wait()
        return results

    return run


def uneven(group: Any, rank: int, world_size: int) -> list[Tensor]:
    parts = [rank_input(rank, 2 + i, torch.int64) for i in range(world_size)]
    output = torch.zeros(2 + rank, dtype=torch.int64)
    group.reduce_scatter([output], [parts]).wait()
    return [output]


def sparse(group: Any, rank: int, world_size: int) -> list[Tensor]:
    with torch.sparse.check_sparse_tensor_invariants():
        tensor = torch.sparse_coo_tensor([[rank]], [1.0], (world_size,))
    work = group.allreduce([tensor])
    work.wait()
    return [work.result()[0].to_dense()]


def others(group: Any, rank: int, world_size: int) -> list[Tensor]:
    """Operations that torch's class carries out by the registered backend."""
    total = torch.tensor([rank])
    group.reduce(total, 0).wait()
    message = torch.tensor([rank])
    if rank == 0:
        group.send([message], 1, 3).wait()
    elif rank == 1:
        group.recv([message], 0, 3).wait()
    group.barrier(given(c10d.BarrierOptions, device_ids=[0])).wait()
    return [total if rank == 0 else torch.zeros(0), message]


def other_spelling(group: Any, rank: int, _: int) -> list[Tensor]:
    tensors = [rank_input(rank, 5, torch.float32) for _ in range(3)]
    group.allreduce(tensors[0], OPS.SUM).wait()
    group.allreduce(tensors[1:]).wait()  # of both together
    ones = [torch.ones(1), torch.ones(1), torch.ones(())]
    group.allreduce(ones[0]).wait()
    group.broadcast(ones[1], 0).wait()
    gathered = [torch.zeros(()) for _ in range(group.size())]
    group.allgather(gathered, ones[2]).wait()
    group.reduce_scatter(ones[2], gathered).wait()
    tensors += ones
    return tensors


BY_SHARED_MEMORY: dict[str, Operation] = {
    **{
        f"{op} of {dtype}": all_reduce(1000, dtype, op)
        for op in (OPS.SUM, OPS.MIN, OPS.MAX)
        for dtype in (*FLOATS, *INTEGERS)
    },
    **{f"{OPS.AVG} of {dtype}": all_reduce(1000, dtype, OPS.AVG) for dtype in FLOATS},
    **{f"sum of {n}": all_reduce(n, torch.float32, OPS.SUM) for n in (0, 1, LONG)},
    "coalesced": coalesced,
    "strided": strided,
    "broadcast": broadcasts,
    "all_gather": gathers,
    "reduce_scatter": scatters(OPS.SUM),
    "reduce_scatter, mean": scatters(OPS.AVG),
}
BY_GLOO: dict[str, Operation] = {
    "product": all_reduce(10, torch.float32, OPS.PRODUCT),
    "bits": all_reduce(10, torch.int64, OPS.BXOR),
    "truth values": all_reduce(10, torch.bool, OPS.SUM),
    "uneven parts": uneven,
    "sparse": sparse,
    "other operations": others,
    "other spelling": other_spelling,
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_equals_gloos(world_size: int) -> None:
    def work(ranks: Ranks) -> dict[str, Any]:
        found = {}
        for name, run in {**BY_SHARED_MEMORY, **BY_GLOO}.items():
            ranks.shared.reset_mock()
            got = run(ranks.shm, ranks.rank, world_size)
            found[name] = got, bool(ranks.shared.mock_calls)
            expected = run(ranks.gloo, ranks.rank, world_size)
            for mine, gloos in zip(got, expected, strict=True):
                if mine.dtype.is_floating_point and world_size > 2:
                    # In another order: a few roundings of terms that are at most about 5.
                    eps = torch.finfo(mine.dtype).eps
                    torch.testing.assert_close(mine, gloos, rtol=2 * eps, atol=20 * eps)
                else:
                    assert torch.equal(mine, gloos), name
        return found

    by_rank = on_ranks(world_size, work)
    for name, (got, shared) in by_rank[0].items():
        assert shared == (name in BY_SHARED_MEMORY), name
        if name.startswith("RedOpType"):  # the same bits everywhere
            assert all(torch.equal(got[0], found[name][0][0]) for found in by_rank)


def test_errors_are_gloos_and_alike_on_all_ranks() -> None:
    def work(ranks: Ranks) -> None:
        integers = torch.ones(3, dtype=torch.int64)
        options = given(c10d.AllreduceOptions, reduceOp=OPS.AVG)
        with pytest.raises(RuntimeError, match="can't be cast"):
            ranks.shm.allreduce([integers], options).wait()
        parts = [torch.zeros(2), torch.zeros(3)]
        with pytest.raises(RuntimeError, match="invalid tensor size"):
            ranks.shm.allgather([parts], [torch.zeros(2)])
        with pytest.raises(RuntimeError):
            ranks.shm._allgather_base(torch.zeros(3), torch.zeros(2))
        for src in (-1, 2):
            with pytest.raises(RuntimeError, match=f"invalid root rank: {src}"):
                ranks.shm.broadcast([torch.ones(2)], given(c10d.BroadcastOptions, rootRank=src))
        with pytest.raises(ValueError, match="lie in one place"):
            ranks.shm.allreduce([torch.ones(1).expand(3)]).wait()
        for method in (ranks.shm.split_group, ranks.shm.merge_remote_group):
            with pytest.raises(RunError, match=r"dist\.new_group"):
                method([0, 1], timedelta(seconds=1), None, "name", "text")
        ranks.shm.barrier().wait()  # no rank is out of step

    on_ranks(2, work)


def test_works_and_futures() -> None:
    def work(ranks: Ranks) -> list[Any]:
        shm, first = ranks.shm, torch.tensor([10.0**ranks.rank])
        issued = shm._get_sequence_number_for_group()
        now = shm.allreduce([first], given(c10d.AllreduceOptions, asyncOp=False))
        assert now.is_completed()
        assert now.is_success()
        assert now.result() == [first]
        assert now.exception() is None
        second = torch.ones(LONG)
        later = shm.allreduce([second])
        assert later.wait(timedelta(seconds=20)) is True
        later.synchronize()
        inside: list[Tensor] = []

        def chained(future: torch.futures.Future[Any]) -> Tensor:
            """A collective inside, as PowerSGD's hook has them."""
            inside.append(future.value()[0] * (1 + ranks.rank))
            shm.allreduce(inside).get_future().wait()
            return inside[0] / 2

        half = shm.allreduce([torch.ones(3)]).get_future().then(chained).wait()
        with torch.inference_mode():
            inferred = torch.ones(3)
            pending = shm.allreduce([inferred])
        pending.wait()  # outside, where torch would not write into it
        parameter = torch.nn.Parameter(torch.ones(2, 3))
        shm.broadcast([parameter]).wait()
        assert parameter.is_leaf
        assert [parameter._version, first._version] == [0, 0]  # for autograd
        shm.reduce(parameter, 0).wait()  # by gloo
        assert shm._get_sequence_number_for_group() - issued == 7
        return [float(t.view(-1)[-1]) for t in (first, second, half, inferred.clone())]

    assert on_ranks(2, work) == [[11.0, 2.0, 3.0, 2.0]] * 2


def test_operations_go_on_while_this_rank_is_busy_elsewhere() -> None:
    """Each would be a deadlock if a rank's part were done only in its own `wait`."""

    def work(ranks: Ranks) -> list[float]:
        shm, tensors = ranks.shm, [torch.ones(LONG) for _ in range(4)]
        other = SharedMemoryGroup(ranks.gloo, share_memory(ProcessGroupCommunicator(ranks.gloo)))
        if ranks.rank == 0:
            late = shm.allreduce([tensors[0]])
            shm.send([torch.zeros(1)], 1, 0).wait()  # rank 1 takes it, then comes
        else:
            shm.recv([torch.zeros(1)], 0, 0).wait()
            late = shm.allreduce([tensors[0]])
        late.wait()
        if ranks.rank == 0:
            late = shm.allreduce([tensors[1]])
            shm.recv([torch.zeros(1)], 1, 0).wait()  # rank 1 sends it when it has the sum
        else:
            late = shm.allreduce([tensors[1]], given(c10d.AllreduceOptions, asyncOp=False))
            shm.send([torch.zeros(1)], 0, 0).wait()
        late.wait()
        order = [(shm, tensors[2]), (other, tensors[3])]
        works = [group.allreduce([t]) for group, t in (order if ranks.rank else order[::-1])]
        for each in works:
            each.wait()
        other._lane.close()
        return [float(tensor[-1]) for tensor in tensors]

    assert on_ranks(2, work) == [[2.0] * 4] * 2


def test_many_threads_of_one_rank() -> None:
    """DDP issues from autograd's thread: order of issue, whichever thread waits first."""

    def work(ranks: Ranks) -> list[float]:
        tensors = [torch.full((100 + i,), float(i)) for i in range(30)]
        works = [ranks.shm.allreduce([tensor]) for tensor in tensors]
        waiting = [threading.Thread(target=each.wait) for each in reversed(works)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        return [float(tensor[-1]) for tensor in tensors]

    assert on_ranks(2, work) == [[2.0 * i for i in range(30)]] * 2


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    may_leave = threading.Event()

    def work(ranks: Ranks) -> str:
        if ranks.rank:
            may_leave.wait(20)
            return ""
        began_s = time.monotonic()
        options = given(c10d.AllreduceOptions, timeout=timedelta(seconds=0.2), asyncOp=False)
        with pytest.raises(LostPeerError) as caught:
            ranks.shm.allreduce([torch.ones(3)], options)
        assert 0.2 <= time.monotonic() - began_s < 5
        may_leave.set()
        return str(caught.value)

    assert "rank(s) 1 in a shared-memory operation" in on_ranks(2, work)[0]


def test_abort_ends_what_waits() -> None:
    may_leave = threading.Event()

    def work(ranks: Ranks) -> str:
        if ranks.rank:
            may_leave.wait(20)
            return ""
        pending = ranks.shm.allreduce([torch.ones(3)])
        queued = ranks.shm.allreduce([torch.ones(3)])
        began_s = time.monotonic()
        threading.Timer(0.1, ranks.shm._lane.abort).start()
        with pytest.raises(LostPeerError, match="1"):
            pending.wait()
        assert time.monotonic() - began_s < 5
        with pytest.raises(RunError, match="aborted"):
            queued.get_future()
        with pytest.raises(RunError, match="destroyed"):
            ranks.shm.allreduce([torch.ones(3)])
        may_leave.set()
        return "done"

    assert on_ranks(2, work)[0] == "done"


def _asked(world_size: int) -> Any:
    return SimpleNamespace(
        store=dist.HashStore(),
        group_rank=0,
        group_size=world_size,
        timeout=timedelta(seconds=20),
        group_id="0",
        global_ranks_in_group=[],
    )


def _is_plain(group: Any) -> bool:
    """Torch's own, which has NCCL too where there is one."""
    gloo = group._get_backend(torch.device("cpu"))
    return type(group) is dist.ProcessGroup and isinstance(gloo, dist.ProcessGroupGloo)


def test_one_rank_is_torchs_own_group() -> None:
    assert _is_plain(create(_asked(1)))
    assert dist.Backend(NAME) == "shm"
    assert dist.is_backend_available("shm")


def test_ranks_of_several_hosts_are_gloos_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(rank: int, _: dist.ProcessGroup) -> Any:
        with store_lock:
            asked = _asked(2)
            asked.store, asked.group_rank = stores.setdefault("one", asked.store), rank
        return create(asked)

    stores: dict[str, Any] = {}
    store_lock = threading.Lock()
    reason = "no shared memory: the ranks are not on one host"

    def refuse(_: object) -> None:
        raise SharedMemoryError(reason)

    with (
        mock.patch.object(module, "share_memory", refuse),
        caplog.at_level(logging.INFO, logger="gradsync"),
    ):
        made = run_thread_ranks(work, 2)
    assert all(_is_plain(group) for group in made)
    assert caplog.messages == [f"backend shm: collectives by gloo: {reason}"]
