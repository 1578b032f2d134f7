import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.batch_plan import BatchPlan, cut_step, share, solve_batch_plan
from gradsync.errors import ConfigError


@given(num_items=st.integers(0, 300), world_size=st.integers(1, 40))
def test_shares_are_contiguous_complete_and_even(num_items: int, world_size: int) -> None:
    shares = [share(num_items, rank, world_size) for rank in range(world_size)]
    assert [item for part in shares for item in part] == list(range(num_items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    micro_batches=st.integers(1, 64),
    micro=st.integers(1, 64),
    seq_len=st.integers(1, 64),
    world_size=st.integers(1, 64),
)
def test_an_exact_plan_is_never_floored(
    micro_batches: int, micro: int, seq_len: int, world_size: int
) -> None:
    tokens = micro_batches * micro * seq_len
    arguments = {"micro_batch_size": micro, "world_size": world_size}
    if world_size > micro_batches:
        with pytest.raises(
            ConfigError, match=rf"{world_size} ranks cannot share {micro_batches} micro"
        ):
            solve_batch_plan(tokens_per_update=tokens, seq_len=seq_len, **arguments)
        return
    plan = solve_batch_plan(tokens_per_update=tokens, seq_len=seq_len, **arguments)
    assert plan.tokens_per_update == tokens
    shares = [plan.micro_batches_of(rank) for rank in range(world_size)]
    assert [index for part in shares for index in part] == list(range(micro_batches))
    assert (
        solve_batch_plan(global_batch_size=micro_batches * micro, **arguments).num_micro_batches
        == micro_batches
    )


def test_description_gives_the_arithmetic_and_the_shares() -> None:
    plan = solve_batch_plan(tokens_per_update=2**15, seq_len=512, micro_batch_size=8, world_size=3)
    assert plan.describe() == (
        "32,768 tokens per update = 8 micro-batches x 8 samples x 512 tokens\n"
        "micro-batches per rank: 2, 3, 3"
    )
    many = BatchPlan(num_micro_batches=33, micro_batch_size=2, world_size=32)
    assert many.describe() == (
        "66 samples per update = 33 micro-batches x 2 samples\n"
        "micro-batches per rank: 2 on 1 rank, 1 on 31 ranks"
    )


EXACT = (
    "tokens_per_update=100000 is not a multiple of micro_batch_size x seq_len = 8 x 1000 = 8000; "
    "the nearest legal tokens_per_update is 96000 or 104000"
)
TOO_MANY = "8 ranks cannot share 4 micro-batches (64 samples per update / micro_batch_size 16)"


@pytest.mark.parametrize(
    ("micro", "ranks", "total", "message"),
    [
        (8, 2, {"tokens_per_update": 100_000, "seq_len": 1000}, EXACT),
        (4, 1, {"global_batch_size": 10}, "global_batch_size is 8 or 12"),
        (4, 4, {"global_batch_size": 9}, "global_batch_size is 16"),  # no rank without work
        (4, 1, {"tokens_per_update": 100, "seq_len": 16}, "tokens_per_update is 64 or 128"),
        (16, 8, {"global_batch_size": 64}, TOO_MANY),
        (1, 1, {}, "either tokens_per_update or global_batch_size"),
        (1, 1, {"tokens_per_update": 8, "global_batch_size": 8}, "either"),
        (1, 1, {"tokens_per_update": 8}, "needs seq_len"),
        (1, 1, {"global_batch_size": 0}, "global_batch_size must be at least 1; got 0"),
        (0, 1, {"global_batch_size": 8}, "micro_batch_size must be at least 1; got 0"),
        (1, -1, {"global_batch_size": 8}, "world_size must be at least 1; got -1"),
    ],
)
def test_what_is_not_exact_is_refused_with_the_nearest_legal_values(
    micro: int, ranks: int, total: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch_plan(micro_batch_size=micro, world_size=ranks, **total)
    assert message in str(caught.value)


@given(
    start=st.integers(0, 1000),
    size=st.integers(0, 100),
    micro=st.integers(1, 20),
    world_size=st.integers(1, 12),
)
def test_a_step_is_cut_alike_for_every_world_size(
    start: int, size: int, micro: int, world_size: int
) -> None:
    def micro_batches(rank: int, ranks: int) -> list[tuple[int, int, int]]:
        span = cut_step(start, start + size, micro_batch_size=micro, rank=rank, world_size=ranks)
        assert span.everyone_has_some == (span.num_micro_batches >= ranks)
        return list(span.micro_batches)

    together = [
        micro_batch for rank in range(world_size) for micro_batch in micro_batches(rank, world_size)
    ]
    assert together == micro_batches(0, 1)
    assert [p for _, first, n in together for p in range(first, first + n)] == list(
        range(start, start + size)
    )
