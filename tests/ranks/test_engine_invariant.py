"""`invariant`: one hash of weights, optimizer state, losses and norms, however a step is done."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.groups import RankPlacement, SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, GradsyncError, RunError
from gradsync.sync.replicate import replicate
from gradsync.world import World
from support.engine_cases import PROBLEMS, MicroBatch, Problem, Way, inputs_of, one_rank, raw, train
from support.thread_ranks import run_thread_ranks

KIB = 2**-10
WAYS = (
    Way(
        told="micro_step",
        options={"bucket_mb": 1.5 * KIB, "first_bucket_mb": 0.5 * KIB, "collective": "backend"},
    ),
    Way(told="last", options={"bucket_mb": 0.3 * KIB, "overlap": False, "collective": "backend"}),
    Way(told="leaf", options={"bucket_mb": 0.3 * KIB}),
    Way(told="nothing", options={"update": "whole"}),
    Way(told="nothing", options={"grouping": "parameter"}),
    Way(told="differently", options={"grouping": "flat", "collective": "backend"}),
    Way(told="leaf", options={"grouping": "flat"}),
)
LAYOUTS = {
    4: ((1, "nothing"), (2, "leaf"), (2, "nothing"), (2, "differently"), (4, "leaf")),
    6: ((2, "differently"), (3, "leaf")),
    8: ((1, "leaf"), (2, "differently"), (4, "nothing")),
}
"""Ranks -> (ranks a host, what is told of leaves)."""


def hashes(problem: Problem, ways: tuple[Way, ...], world_size: int) -> list[dict[Way, str]]:
    def work(_: int, group: dist.ProcessGroup) -> list[str]:
        comm = ProcessGroupCommunicator(group)
        return [train(problem, way, comm) for way in ways]

    return run_thread_ranks(work, world_size)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(("branches", n) for n in (2, 5, 8)),
        *(("11 leaves", 4), ("5 leaves", 7), ("sgd and adamw", 2)),
    ],
)
def test_any_number_of_ranks(name: str, world_size: int) -> None:
    """Powers of two and not, and more ranks than leaves."""
    ways = (
        Way(told="differently"),
        Way(options={"weights": "shared"}),
        Way(told="differently", options={"bucket_mb": KIB, "collective": "backend"}),
    )
    for found in hashes(PROBLEMS[name], ways, world_size):
        assert found == [one_rank(name)] * len(ways)


@pytest.mark.parametrize("name", PROBLEMS)
def test_any_problem_in_any_way(name: str) -> None:
    """Bucket sizes, groupings, overlap, what is told of leaves."""
    for found in hashes(PROBLEMS[name], WAYS, 3):
        assert found == [one_rank(name)] * len(WAYS)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_any_way_on_one_rank(way: Way) -> None:
    assert train(PROBLEMS["branches"], way, SingleCommunicator()) == one_rank("branches")


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_in_two_stages(world_size: int) -> None:
    small = {"bucket_mb": KIB, "collective": "backend"}
    ways = tuple(
        Way(told=told, ranks_a_host=size, options=small | more)
        for size, told in LAYOUTS[world_size]
        for more in ({}, {"reduction": "hierarchical"})[: 1 + (told == "leaf")]
    )
    for name in ("branches", "5 leaves"):
        for found in hashes(PROBLEMS[name], ways, world_size):
            assert found == [one_rank(name)] * len(ways)


@pytest.mark.parametrize("world_size", [3, 8])
def test_nodes_in_bf16(world_size: int) -> None:
    """Each is rounded where it is formed: a hash of its own, and the same in any way."""
    sync, small = "invariant_bf16", {"bucket_mb": KIB}
    ways = (
        Way(sync=sync, told="nothing"),
        Way(sync=sync, told="differently", options=small | {"grouping": "flat"}),
        Way(sync=sync, options={"overlap": False}),
        *(Way(sync=sync, ranks_a_host=n, options=small) for n in (1, 2) if world_size % n == 0),
    )
    assert one_rank("branches", sync) != one_rank("branches")
    for name in ("branches", "minus zero"):
        for found in hashes(PROBLEMS[name], ways, world_size):
            assert found == [one_rank(name, sync)] * len(ways)


@pytest.mark.parametrize("sizes", [(1,), (1, 1)])
def test_what_rounds_to_minus_zero_is_zero(sizes: tuple[int, ...]) -> None:
    """Else a node with such a leaf would differ from one with zeros in its place."""
    model = nn.ParameterList(torch.ones(size) for size in sizes)
    sync = replicate(model, strategy="invariant_bf16")
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model))
    sync.backward(sum((p * -1e-45).sum() for p in model), MicroBatch(0, True, 1), reduction="sum")
    sync.step(optimizer)
    assert [raw(g) for g in seen] == [raw(torch.zeros(1))] * len(sizes)


def test_another_order_would_show() -> None:
    """The hashes above can fail: plain sums over three ranks give other ones."""
    (first, *rest) = hashes(PROBLEMS["branches"], (Way(sync="bucketed"),), 3)
    assert rest == [first, first]
    assert first != [one_rank("branches")]


def _tree_sum(gradients: list[Tensor], nodes: torch.dtype) -> Tensor:
    """The sum along the tree, each node rounded to the dtype `nodes`."""
    if len(gradients) == 1:
        return gradients[0].to(nodes)
    half = 1 << ((len(gradients) - 1).bit_length() - 1)
    left, right = (_tree_sum(part, nodes) for part in (gradients[:half], gradients[half:]))
    return (left.float() + right.float()).to(nodes)


@pytest.mark.parametrize("num_leaves", [1, 3, 6, 8])
@pytest.mark.parametrize(
    ("name", "nodes"), [("invariant", torch.float32), ("invariant_bf16", torch.bfloat16)]
)
def test_is_what_the_definition_says(name: str, nodes: torch.dtype, num_leaves: int) -> None:
    """Leaf by leaf in plain torch, added along the tree by hand, multiplied once by 1/weight."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    leaves = [inputs_of(0, leaf, 6) for leaf in range(num_leaves)]
    weight = sum(len(x) for x, _ in leaves)
    by_leaf = []
    for x, y in leaves:
        loss = (model(x) - y).square().sum()
        by_leaf.append(torch.autograd.grad(loss, list(model.parameters())))
    expected = [
        _tree_sum(list(of_parameter), nodes).float() * (1 / weight)
        for of_parameter in zip(*by_leaf, strict=True)
    ]
    sync = replicate(model, strategy=name)
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters())
    )
    for index, (x, y) in enumerate(leaves):
        last = index == num_leaves - 1
        sync.backward(
            (model(x) - y).square().sum(), MicroBatch(index, last, len(x)), reduction="sum"
        )
    sync.step(optimizer)
    assert [raw(g) for g in seen] == [raw(g) for g in expected]


def _wrong_leaves(
    world_size: int, shares: list[list[int]], *, last: bool = True
) -> list[BaseException | None]:
    """The error of each rank's step when ranks say that they have these leaves."""

    def work(rank: int, group: dist.ProcessGroup) -> BaseException | None:
        model = nn.Linear(2, 2)
        sync = replicate(model, strategy="invariant", comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for place, index in enumerate(shares[rank]):
                is_last = last and place == len(shares[rank]) - 1
                with sync.micro_step(last=is_last, index=index):
                    sync.backward(model(torch.ones(1, 2)).sum(), weight=1, reduction="sum")
            sync.step(optimizer)
        except GradsyncError as error:
            return error
        finally:
            sync.close()
        return None

    return run_thread_ranks(work, world_size)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            [[0, 1], [3, 4], [5]],
            r"rank 1's first micro-batch is 3, but the ranks below it have micro-batches 0..1",
        ),
        ([[2, 3], [0, 1], [4]], r"rank 0's first micro-batch is 2"),
        ([[1], [], [2]], r"rank 0's first micro-batch is 1"),
        ([[0, 1], [0, 1], [0]], r"rank 1's first micro-batch is 0"),
    ],
    ids=["a gap", "wrong order", "begins late", "local indices"],
)
def test_leaves_that_do_not_follow_each_other(
    shares: list[list[int]], message: str, last: bool
) -> None:
    """The error is found on a thread, and reaches `step` on every rank: none waits."""
    for error in _wrong_leaves(3, shares, last=last):
        assert isinstance(error, RunError)
        with pytest.raises(RunError, match=message):
            raise error


@pytest.mark.parametrize("leaves", [[0, 2], [1, 0], [0, 0]])
def test_leaves_of_a_rank_that_do_not_follow_each_other(leaves: list[int]) -> None:
    """A mistake of the loop's author, so one of our errors, and it names the leaves."""
    model = nn.Linear(2, 2)
    sync = replicate(model, strategy="invariant")

    def backward(index: int) -> None:
        sync.backward(model(torch.ones(1, 2)).sum(), MicroBatch(index, False, 1), reduction="sum")

    first, second = leaves
    backward(first)
    with pytest.raises(
        GradsyncError, match=f"micro-batch {second} came where micro-batch {first + 1} was due"
    ):
        backward(second)


def test_hosts_are_followed_where_the_world_tells_them_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two_by_two = {"world_size": 4, "local_world_size": 2, "num_nodes": 2}
    worlds = {
        "inside of 2 hosts": lambda r: World(
            rank=r, local_rank=r % 2, node_rank=r // 2, **two_by_two
        ),
        "got [[0, 2], [1, 3]]": lambda r: World(
            rank=r, local_rank=r // 2, node_rank=r % 2, **two_by_two
        ),
        "": lambda r: World(rank=r, world_size=4),  # made by hand: every rank has one place
    }

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        comm, found = ProcessGroupCommunicator(group), []
        for make in worlds.values():
            model = nn.Linear(2, 2)
            sync = replicate(model, make(rank), strategy="invariant", comm=comm)
            for leaf in (2 * rank, 2 * rank + 1):
                inputs = torch.arange(2.0 * leaf, 2 * leaf + 2)
                sync.backward(model(inputs).square().sum(), weight=1, reduction="sum")
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
            sync.close()
            found.append(model.weight.detach().clone())
        return found

    with caplog.at_level("INFO", logger="gradsync"):
        ranks = run_thread_ranks(work, 4)
    assert all(torch.equal(a, b) for rank in ranks for a, b in zip(rank, ranks[0], strict=True))
    for said in worlds:
        assert said in caplog.text


def test_two_stages_need_hosts_in_order() -> None:
    """Ranks dealt round over hosts, or hosts of unequal size: the tree cannot be cut there."""

    def work(_: int, group: dist.ProcessGroup) -> list[str]:
        comm = ProcessGroupCommunicator(group)
        found = []
        for nodes in ([0, 1, 0, 1], [0, 0, 0, 1]):
            with pytest.raises(ConfigError) as caught:
                replicate(
                    nn.Linear(2, 2),
                    strategy="invariant",
                    comm=comm,
                    reduction="hierarchical",
                    hosts=RankPlacement(tuple(nodes)),
                )
            found.append(str(caught.value))
        with pytest.raises(ConfigError, match=r"world of `gs.init"):
            replicate(nn.Linear(2, 2), strategy="invariant", comm=comm, reduction="hierarchical")
        return found

    for dealt_round, unequal in run_thread_ranks(work, 4):
        assert "hosts with equally many ranks, numbered host by host; got [[0, 2], [1, 3]]" in (
            dealt_round
        )
        assert "got [[0, 1, 2], [3]]; use reduction='backend'" in unequal


@pytest.mark.parametrize(("sync", "threads"), [("invariant", 1), ("invariant", 2), ("bucketed", 2)])
def test_other_numbers_of_threads_are_warned_of(
    sync: str, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        replicate(nn.Linear(2, 2), World(), strategy=sync).close()
    finally:
        torch.set_num_threads(before)
    assert ("gs.init(threads=1)" in caplog.text) == (sync == "invariant" and threads == 2)
