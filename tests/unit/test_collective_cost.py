"""What collectives cost by formula, against sums made by hand."""

from __future__ import annotations

import pytest

from gradsync.errors import ConfigError
from gradsync.plan.collectives import ALL_REDUCE, Place, all_reduce_s, half_s
from gradsync.plan.description import Link

NEAR = Link(name="near", alpha_s=1.0, bytes_per_s=1.0)
FAR = Link(name="far", alpha_s=10.0, bytes_per_s=0.1)
PORT = Link(name="port", alpha_s=10.0, bytes_per_s=0.1, per_host=True)


def place(ranks: int, per_host: int, network: Link | None = FAR) -> Place:
    return Place(ranks=ranks, per_host=per_host, link=NEAR, network=network)


ONE_HOST = [
    # 4 ranks, 8 bytes: messages of 2 bytes at 1 s + 1 s/byte
    ("ring", 4, 6 * (1 + 2)),
    ("halving", 4, 2 * ((1 + 4) + (1 + 2))),
    ("doubling", 4, 2 * (1 + 8)),
    ("hierarchical", 4, 6 * (1 + 2)),
    ("owners", 4, 2 * 3 * (1 + 2)),
    # 3 ranks: one hands its 8 bytes to a partner and gets them back
    ("doubling", 3, 1 * (1 + 8) + 2 * (1 + 8)),
    ("halving", 3, 2 * (1 + 4) + 2 * (1 + 8)),
    ("ring", 3, 4 * (1 + 8 / 3)),
]


@pytest.mark.parametrize(("algorithm", "ranks", "expected"), ONE_HOST)
def test_on_one_host(algorithm: str, ranks: int, expected: float) -> None:
    assert all_reduce_s(place(ranks, 8, None), 8, algorithm) == pytest.approx(expected)


def test_two_hosts_of_two() -> None:
    """8 bytes among 4 ranks, of which pairs share a host."""
    pairs = place(4, 2)
    # A ring: a piece of 2 bytes takes 20 s over the network, 3 times each way; of its 3 steps one
    # crosses and two do not.
    assert all_reduce_s(pairs, 8, "ring") == pytest.approx(2 * (3 * 20 + 10 + 2 * 1))
    # Two levels: 4 bytes to the neighbour and back; between the hosts 4 bytes in two pieces of 2.
    assert all_reduce_s(pairs, 8, "hierarchical") == pytest.approx(2 * (1 + 4) + 2 * (10 + 20))
    # Halving: 4 bytes to the neighbour, 2 bytes across; and back.
    assert all_reduce_s(pairs, 8, "halving") == pytest.approx(2 * ((1 + 4) + (10 + 20)))
    assert all_reduce_s(pairs, 8, "best") == pytest.approx(70)
    # Owners: one message of 2 bytes inside, two across, each way.
    assert all_reduce_s(pairs, 8, "owners") == pytest.approx(2 * ((1 + 2) + 2 * (10 + 20)))


def test_ranks_share_the_port_of_their_host() -> None:
    port = place(4, 2, PORT)
    # A ring sends from one rank of each host: nothing to share. Others send from both.
    assert all_reduce_s(port, 8, "ring") == all_reduce_s(place(4, 2), 8, "ring")
    assert all_reduce_s(port, 8, "halving") == pytest.approx(2 * ((1 + 4) + (10 + 40)))
    assert all_reduce_s(port, 8, "hierarchical") == pytest.approx(2 * (1 + 4) + 2 * (10 + 40))


def test_half_of_an_all_reduce() -> None:
    assert half_s(place(4, 8, None), 8) == pytest.approx(3 * (1 + 2))
    assert half_s(place(4, 1), 8) == pytest.approx(3 * 20 + 3 * 10)


def test_one_rank_sends_nothing() -> None:
    alone = place(1, 8, None)
    assert half_s(alone, 8) == 0
    assert [all_reduce_s(alone, 8, name) for name in (*ALL_REDUCE, "best")] == [0] * 6


@pytest.mark.parametrize("algorithm", [*ALL_REDUCE, "best"])
def test_more_bytes_and_more_hosts_never_cost_less(algorithm: str) -> None:
    by_bytes = [all_reduce_s(place(16, 4), size, algorithm) for size in (1, 100, 10_000)]
    assert by_bytes == sorted(by_bytes)
    by_ranks = [all_reduce_s(place(n, 4), 1e6, algorithm) for n in (4, 8, 16, 32, 64)]
    assert by_ranks == sorted(by_ranks)


def test_several_hosts_need_a_network() -> None:
    with pytest.raises(ConfigError, match="2 hosts, but no network"):
        place(8, 4, None)
