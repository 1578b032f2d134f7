"""Backend `shm`: waits that expire, signal handlers, and compiled programs."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from gradsync.backends.group import SharedMemoryGroup
from gradsync.backends.lane import Lane, LaneOperation
from gradsync.core import torch_private
from gradsync.core.torch_private import outside_graphs
from gradsync.errors import RunError
from support.shm_ranks import Ranks, on_ranks


def test_a_wait_that_expires_leaves_the_operation_alone() -> None:
    may_come = threading.Event()

    def work(ranks: Ranks) -> list[float]:
        if ranks.rank:
            may_come.wait(20)
        tensors = [torch.ones(3), torch.ones(3)]
        works = [ranks.shm.allreduce([tensor]) for tensor in tensors]
        if ranks.rank == 0:
            for each in (*works, works[0]):
                with pytest.raises(RunError, match=r"not over after 0.1 s; it goes on"):
                    each.wait(timedelta(seconds=0.1))
                assert not each.is_completed()
            may_come.set()
        assert all(each.wait(timedelta(seconds=20)) for each in works)
        return [float(tensor[0]) for tensor in tensors]

    assert on_ranks(2, work) == [[2.0, 2.0]] * 2


@pytest.mark.timeout(20)
def test_a_signal_handler_may_destroy_the_group_in_the_middle_of_an_operation() -> None:
    """A handler runs in the thread that it interrupts; here the operation calls it."""
    shared = mock.Mock()
    lane = Lane(shared, lambda: timedelta(seconds=5))
    issue: Any = lane.issue
    issue(lambda _: None, [], timeout_s=None, at_once=False).wait()  # there is a helper thread

    def interrupted(_: object) -> None:
        with pytest.raises(RunError, match="signal handler waits for a collective"):
            issue(lambda _: None, [], timeout_s=None, at_once=True)
        lane.close()
        assert shared.timeout_s == 0  # whatever the operation waits for
        assert not shared.close.called
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        issue(interrupted, [], timeout_s=None, at_once=True)
    shared.close.assert_called_once_with()
    with pytest.raises(RunError, match="destroyed"):
        issue(lambda _: None, [], timeout_s=None, at_once=True)
    lane.close()
    assert shared.close.call_count == 1


def test_a_compiled_program_breaks_its_graph_at_the_methods() -> None:
    """Its compiler looks neither into them nor into what they call."""

    class Plain:
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return thirds(x)

    def thirds(x: torch.Tensor) -> torch.Tensor:
        return x / 3

    def compiler(graph: Any, _: object) -> Any:
        seen.append([node.target.__name__ for node in graph.graph.nodes if callable(node.target)])
        return graph.forward

    seen: list[list[str]] = []
    plain = outside_graphs(Plain)()
    program = torch.compile(lambda x: plain.method(x * 6) + 1, backend=compiler)
    assert float(program(torch.ones(()))) == 3
    assert seen == [["mul"], ["add"]]
    for cls, method in ((SharedMemoryGroup, "allreduce"), (LaneOperation, "wait")):
        assert getattr(cls, method)._torchdynamo_disable


def test_methods_that_graphs_leave_out_are_marked_or_wrapped() -> None:
    def made() -> Any:
        class Plain:
            def method(self) -> int:
                return 1

        return Plain

    marked = outside_graphs(made())
    assert marked.method._torchdynamo_disable
    with mock.patch.object(torch_private, "_skip", return_value=False):  # a torch that has no marks
        wrapped = outside_graphs(made())
    assert wrapped.method._torchdynamo_disable
    assert wrapped().method() == marked().method() == 1
