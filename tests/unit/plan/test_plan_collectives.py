"""Costs of collectives: by formula, against sums made by hand, and by lines through times."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.plan.description import Link
from gradsync.commands.plan.measured import fit_line, load_fits, save_fits
from gradsync.commands.plan.step_costs import ALL_REDUCE, GroupPlace, all_reduce_s, half_s
from gradsync.errors import RunError
from support.planned_machines import line

SIZES = [4**k for k in range(1, 16)]
MACHINE: dict[str, Any] = {
    **{"device": "cpu", "cpu": "c", "cores": 2, "threads": 1, "torch": "2"},
    **{"world_size": 2, "num_nodes": 1, "dtype": "fp32"},
}


def fitted(points: dict[int, float]) -> tuple[float, float, float]:
    fit = fit_line("all_reduce", "ring", points)
    assert (fit.operation, fit.algorithm) == ("all_reduce", "ring")
    return fit.alpha_s, fit.beta_s_per_byte, fit.residual


def test_an_exact_line_is_found() -> None:
    alpha, beta, residual = fitted({size: 2e-5 + 8e-10 * size for size in SIZES})
    assert (alpha, beta) == (pytest.approx(2e-5), pytest.approx(8e-10))
    assert residual == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("outlier", range(0, len(SIZES), 2))
@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_one_disturbed_size_does_not_bend_it(outlier: int, factor: float) -> None:
    noise = random.Random(outlier)
    times = [(1e-4 + 8e-10 * size) * math.exp(noise.gauss(0, 0.05)) for size in SIZES]
    times[outlier] *= factor
    alpha, beta, residual = fitted(dict(zip(SIZES, times, strict=True)))
    assert alpha == pytest.approx(1e-4, rel=0.15)
    assert beta == pytest.approx(8e-10, rel=0.25)
    assert residual < 0.15


def test_short_messages_count_as_much_as_long_ones() -> None:
    """Plain least squares would give up 4 B for a millionth of 1 GiB."""
    points = {size: 1e-5 if size < 2**20 else 1e-9 * size * 1.3 for size in SIZES}
    assert fitted(points)[0] == pytest.approx(1e-5, rel=0.1)


def test_neither_number_falls_below_zero() -> None:
    assert fitted({4: 0.1, 8: 0.05})[1] == 0
    assert fitted({4: 0.1, 8: 0.4})[0] == 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path))
    return tmp_path


ONE, OTHER = line("all_reduce", "ring", 1e-4, 1e-9), line("broadcast", "ring", 1e-4, 1e-9)


def test_lines_are_kept_for_their_machine(cache: Path) -> None:
    assert load_fits(MACHINE) == ()
    assert save_fits(MACHINE, [ONE, OTHER]).is_relative_to(cache)
    assert load_fits(MACHINE) == (ONE, OTHER)
    for name, value in (("dtype", "bf16"), ("world_size", 4), ("cpu", "d"), ("num_nodes", 2)):
        assert load_fits(MACHINE | {name: value}) == ()
    new = replace(ONE, alpha_s=5.0)  # takes the place of its own line only
    save_fits(MACHINE, [new])
    assert load_fits(MACHINE) == (new, OTHER)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fits": [{"alpha": 1}]}'])
def test_a_damaged_cache_is_named_and_replaced(
    text: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_fits(MACHINE, [OTHER])
    path.write_text(text)
    save_fits(MACHINE, [ONE])
    assert f"{path} cannot be used (" in caplog.text
    assert load_fits(MACHINE) == (ONE,)


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    (cache / "alpha-beta").touch()
    with pytest.raises(RunError, match="GRADSYNC_CACHE can name another cache"):
        save_fits(MACHINE, [ONE])


NEAR = Link(name="near", alpha_s=1.0, bytes_per_s=1.0)
FAR = Link(name="far", alpha_s=10.0, bytes_per_s=0.1)
PORT = Link(name="port", alpha_s=10.0, bytes_per_s=0.1, per_host=True)


def place(ranks: int, per_host: int, network: Link | None = FAR) -> GroupPlace:
    return GroupPlace(ranks=ranks, per_host=per_host, link=NEAR, network=network)


ONE_HOST = [
    # 4 ranks, 8 bytes: messages of 2 bytes at 1 s + 1 s/byte
    ("ring", 4, 6 * (1 + 2)),
    ("halving", 4, 2 * ((1 + 4) + (1 + 2))),
    ("doubling", 4, 2 * (1 + 8)),
    ("hierarchical", 4, 6 * (1 + 2)),
    ("tree", 4, 2 * ((1 + 4) + (1 + 2))),
    ("tree", 3, 2 * 2 * (1 + 8 / 3)),
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
    # The tree: 4 bytes to the neighbour, 2 across; and back.
    assert all_reduce_s(pairs, 8, "tree") == pytest.approx(2 * ((1 + 4) + (10 + 20)))
    # Three hosts of two: 4 bytes to the neighbour, a third of them to each other host.
    tree = 2 * (1 + 4) + 2 * 2 * (10 + 10 * 4 / 3)
    assert all_reduce_s(place(6, 2), 8, "tree") == pytest.approx(tree)
    # Two hosts, of two and of one: everything goes to its owner, one inside and one across.
    assert all_reduce_s(place(3, 2), 8, "tree") == pytest.approx(
        2 * ((1 + 8 / 3) + (10 + 10 * 8 / 3))
    )


def test_ranks_share_the_port_of_their_host() -> None:
    port = place(4, 2, PORT)
    # A ring sends from one rank of each host: nothing to share. Others send from both.
    assert all_reduce_s(port, 8, "ring") == all_reduce_s(place(4, 2), 8, "ring")
    assert all_reduce_s(port, 8, "halving") == pytest.approx(2 * ((1 + 4) + (10 + 40)))
    assert all_reduce_s(port, 8, "hierarchical") == pytest.approx(2 * (1 + 4) + 2 * (10 + 40))


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
