"""From a failing step to a cause: decided on made-up gradients, without any rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.verify.compare import add_up
from gradsync.verify.diagnose import (
    Scene,
    _leaf,
    common_ratio,
    diagnose,
    name_of_factor,
    ratio,
)
from gradsync.verify.judge import Verdict, _samples
from gradsync.verify.plan import Variant
from gradsync.verify.reference import LeafResult
from gradsync.verify.result import (
    Cause,
    Diagnosis,
    Finding,
    Kind,
    listed,
    minority,
    sentence,
)

WEIGHTS = (1.0, 2.0, 4.0, 4.0, 5.0)
OWNERS = (0, 0, 1, 1, 1)
Gradients = list[dict[str, Tensor]]


def results() -> list[LeafResult]:
    generator = torch.Generator().manual_seed(1)
    return [
        LeafResult(
            index=index,
            weight=weight,
            loss_sum=weight,
            gradient={
                "a": torch.randn(40, generator=generator),
                "b": torch.randn(10, generator=generator),
            },
            buffers={},
        )
        for index, weight in enumerate(WEIGHTS)
    ]


def right() -> Gradients:
    exact = add_up(results())
    return [{name: exact.mean(name).float() for name in "ab"} for _ in range(2)]


def own(rank: int) -> dict[str, Tensor]:
    """What a rank has before anything is reduced, over all targets."""
    mine = add_up([r for r in results() if OWNERS[r.index] == rank])
    return {name: (mine.total[name] / sum(WEIGHTS)).float() for name in "ab"}


def scene(
    gradients: Gradients, *kinds: Kind, previous: Gradients | None = None, dtype: str = "fp32"
) -> Scene:
    kinds = kinds or (Kind.GRADIENT,)
    findings = [Finding(kind=kind, step=2, names=("a", "b")) for kind in kinds]
    documents: list[dict[str, Any]] = [
        {
            "norm": None,
            "leaves": [{"index": i, "weight": WEIGHTS[i]} for i in range(5) if OWNERS[i] == rank],
        }
        for rank in range(2)
    ]
    return Scene(
        verdict=Verdict(findings),
        exact=add_up(results()),
        results=results(),
        documents=documents,
        gradients=gradients,
        previous=previous or [{}, {}],
        clip_norm=None,
        dtype=dtype,
        has_batch_norm=True,
    )


def run(made: Scene, vanishes: Callable[[Variant], bool] = lambda variant: False) -> Diagnosis:
    """Answer the questions of `diagnose`."""
    steps = diagnose(made)
    try:
        variant = next(steps)
        while True:
            variant = steps.send(vanishes(variant))
    except StopIteration as end:
        found: Diagnosis = end.value
        return found


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2.0, "2, the number of ranks: never divided by it"),
        (0.5, "1/2: divided by the number of ranks once more"),
        (16.0, "16, the number of targets: a sum, not a mean"),
        (0.0625, "1/16: divided by the number of targets twice"),
        (5.0, "5, the number of leaves"),
        (0.2, "1/5: divided by the number of leaves as well"),
        (7.5, "7.5"),
    ],
)
def test_a_constant_factor_is_scaling(factor: float, words: str) -> None:
    wrong = [{name: factor * g for name, g in each.items()} for each in right()]
    found = run(scene(wrong))
    assert found.cause == Cause.LOSS_SCALING
    assert words in found.sentence


def test_each_rank_its_own_factor() -> None:
    wrong = [
        {name: 16 / weight * g for name, g in each.items()}
        for each, weight in zip(right(), (3.0, 13.0), strict=True)
    ]
    found = run(scene(wrong, Kind.GRADIENT, Kind.GRADIENT_REPLICAS))
    assert found.cause == Cause.LOSS_SCALING
    assert "this rank's own 3 targets instead of all 16 (on rank 0)" in found.sentence


def test_the_mean_of_means() -> None:
    parts = [add_up([r for r in results() if OWNERS[r.index] == rank]) for rank in range(2)]
    mean = {n: (parts[0].mean(n) + parts[1].mean(n)).float() / 2 for n in "ab"}
    found = run(scene([mean, mean]))
    assert found.cause == Cause.LOSS_SCALING
    assert "mean of the ranks' own means" in found.sentence


@pytest.mark.parametrize(("sign", "word"), [(-1, "missing"), (1, "twice")])
def test_a_leaf_lost_or_double(sign: int, word: str) -> None:
    leaf = results()[3]
    wrong = [
        {name: g + sign * leaf.gradient[name] / sum(WEIGHTS) for name, g in each.items()}
        for each in right()
    ]
    found = run(scene(wrong))
    assert found.cause == Cause.DATA
    assert f"leaf 3 is {word}" in found.sentence
    assert found.ranks == [1]


def test_one_parameter_of_its_own() -> None:
    wrong = [each | {"b": own(rank)["b"]} for rank, each in enumerate(right())]
    found = run(scene(wrong, Kind.GRADIENT, Kind.GRADIENT_REPLICAS))
    assert found.cause == Cause.UNSYNCHRONISED
    assert found.names == ["b"]


def test_everything_its_own_with_and_without_accumulation() -> None:
    wrong = [own(0), own(1)]
    asked: list[Variant] = []

    def vanishes(variant: Variant) -> bool:
        asked.append(variant)
        return variant.one_leaf_per_rank

    late = run(scene(wrong, Kind.GRADIENT, Kind.GRADIENT_REPLICAS), vanishes)
    assert late.cause == Cause.FLAG_TOO_LATE
    assert asked == [Variant(one_leaf_per_rank=True)]
    assert late.tried == ["one leaf a rank, no accumulation: gone"]
    never = run(scene(wrong, Kind.GRADIENT, Kind.GRADIENT_REPLICAS))
    assert never.cause == Cause.UNSYNCHRONISED
    assert never.names == ["a", "b"]


def test_stale_and_absent_gradients() -> None:
    before = [{"a": torch.randn(40), "b": torch.arange(10.0)} for _ in range(2)]
    wrong = [each | {"b": torch.arange(10.0)} for each in right()]
    assert "stale" in run(scene(wrong, previous=before)).sentence
    nothing = [{"a": each["a"]} for each in right()]
    found = run(scene(nothing))
    assert found.cause == Cause.UNSYNCHRONISED
    assert "no gradient of it arrives" in found.sentence


@pytest.mark.parametrize(
    ("variant", "dtype", "cause"),
    [
        (Variant(dropout=False), "fp32", Cause.RANDOM),
        (Variant(frozen_batch_norm=True), "fp32", Cause.BATCH_NORM),
        (Variant(dtype="fp32"), "bf16", Cause.DTYPE),
        (Variant(dtype="fp64"), "fp32", Cause.DTYPE),
        (None, "fp32", Cause.UNKNOWN),
    ],
)
def test_variants_decide_what_evidence_does_not(
    variant: Variant | None, dtype: str, cause: Cause
) -> None:
    torch.manual_seed(0)
    noise = [{name: g + 0.3 * torch.randn_like(g) for name, g in right()[0].items()}] * 2
    found = run(scene(noise, dtype=dtype), lambda asked: asked == variant)
    assert found.cause == cause
    assert bool(found.tried)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_rounding_is_recognised(dtype: torch.dtype, name: str) -> None:
    rounded = [{n: g.to(dtype).float() for n, g in each.items()} for each in right()]
    found = run(scene(rounded))
    assert found.cause == Cause.DTYPE
    assert f"rounded to {name}" in found.sentence
    exact = add_up(results())
    single = [{n: exact.mean(n).float() for n in "ab"} for _ in range(2)]
    assert "rounded to fp32" in run(scene(single, dtype="fp64")).sentence


def _noisy(size: float) -> Gradients:
    """Off by a share of each parameter's norm, not of each element."""
    generator = torch.Generator().manual_seed(3)
    wrong = {}
    for name, g in right()[0].items():
        noise = torch.randn(g.shape, generator=generator)
        wrong[name] = g + size * g.norm() * noise / noise.norm()
    return [wrong, wrong]


@pytest.mark.parametrize(
    "gradients",
    [
        [{name: torch.full_like(g, float("nan")) for name, g in each.items()} for each in right()],
        [{name: torch.full_like(g, float("inf")) for name, g in each.items()} for each in right()],
        right(),  # its error is that of fp32
        _noisy(1e-5),
    ],
    ids=["nan", "inf", "exact", "small"],
)
def test_no_rounding_where_there_is_none(gradients: Gradients) -> None:
    found = run(scene(gradients))
    assert found.cause == Cause.UNKNOWN, found.sentence


def test_rounding_is_spread_over_all_elements() -> None:
    """The error's size is that of bf16, but all of it sits in one small element."""
    exact = add_up(results())
    wrong = {}
    for name, g in right()[0].items():
        wrong[name] = g.clone()
        wrong[name][exact.magnitude[name].argmin()] += 0.01 * g.norm()
    found = run(scene([wrong, wrong]))
    assert found.cause == Cause.UNKNOWN, found.sentence


@pytest.mark.parametrize("kind", [Kind.GRADIENT, Kind.NORM, Kind.GRADIENT_REPLICAS])
@pytest.mark.parametrize("other", [Kind.LOSS, Kind.REPLICAS, Kind.BUFFERS, Kind.UPDATE])
def test_gradients_are_only_called_right_when_they_are(kind: Kind, other: Kind) -> None:
    found = run(scene(_noisy(0.3), kind, other))
    assert found.cause == Cause.UNKNOWN
    assert " right" not in found.sentence
    assert kind.value in found.sentence


def test_what_is_not_finite_on_one_rank_comes_first() -> None:
    found = run(scene(right(), Kind.FINITE, Kind.GRADIENT, Kind.LOSS))
    assert found.cause == Cause.UNKNOWN
    assert "not finite on one rank either" in found.sentence


def test_a_forward_that_cannot_be_repeated_comes_before_its_effects() -> None:
    made = scene(_noisy(0.3), Kind.GRADIENT, Kind.LOSS)
    finding = Finding(kind=Kind.FORWARD, step=2, ranks=(1,), detail="it depends on the rank")
    made.forward = Cause.UNKNOWN, finding
    found = run(made)
    assert (found.cause, found.ranks) == (Cause.UNKNOWN, [1])
    assert "the forward is not reproducible" in found.sentence
    made.verdict.findings.insert(0, Finding(kind=Kind.DATA, step=2))
    assert run(made).cause == Cause.DATA


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Kind.START, Cause.INITIAL_WEIGHTS),
        (Kind.DATA, Cause.DATA),
        (Kind.RANDOM, Cause.RANDOM),
        (Kind.MOVED, Cause.UNSYNCHRONISED),
        (Kind.BITS, Cause.ORDER),
        (Kind.REPLICAS, Cause.UNSYNCHRONISED),
        (Kind.MEETING, Cause.UNSYNCHRONISED),
        (Kind.BUFFERS, Cause.BATCH_NORM),
        (Kind.UPDATE, Cause.OPTIMIZER),
        (Kind.FALL, Cause.UNKNOWN),
        (Kind.LOSS, Cause.LOSS_SCALING),
    ],
)
def test_what_was_recorded_says_the_rest(kind: Kind, cause: Cause) -> None:
    found = run(scene(right(), kind))
    assert found.cause == cause
    assert "step 2" in found.sentence


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("cause", Cause)
def test_every_sentence_says_what_why_and_what_to_do(kind: Kind, cause: Cause) -> None:
    finding = Finding(kind=kind, step=3, names=("w",), ranks=(1,))
    text = sentence(cause, finding, "because")
    assert text.startswith("step 3, 'w', rank 1: ")
    assert f"{cause.value}: because. " in text
    assert text.endswith(".")


def test_ratio_needs_the_same_direction() -> None:
    a = torch.randn(100)
    assert ratio(3 * a, a) == pytest.approx(3.0)
    assert ratio(a + 0.1 * torch.randn(100), a) is None
    assert ratio(torch.zeros(3), a[:3]) is None
    assert ratio(a[:3], torch.zeros(3)) is None
    assert ratio(torch.full((3,), float("nan")), a[:3]) is None
    assert common_ratio({"a": a}, {"a": a, "b": a}) is None  # a missing one is no match


def test_nothing_lost_in_a_right_sum() -> None:
    assert _leaf(scene(right())) is None


def test_a_factor_of_one_has_no_name() -> None:
    named = name_of_factor(1.0, world_size=1, weight=1.0, own_weight=1.0, num_leaves=1)
    assert named == "1"


def test_minority() -> None:
    assert minority(["x", "x", "x"]) == ()
    assert minority(["x", "y", "x"]) == (1,)
    assert minority(["x", "y"]) == (1,)
    assert minority(["y", "x", "x"]) == (0,)


def test_words_and_json() -> None:
    assert listed(("a", "b")) == "'a', 'b'"
    assert listed(tuple("abcde")) == "'a', 'b', 'c' and 2 more"
    finding = Finding(kind=Kind.DATA, step=1, names=["a"], ranks=[0, 2], detail="x")
    assert Finding(**json.loads(json.dumps(asdict(finding)))) == finding


def test_samples_that_nobody_knows_are_counted() -> None:
    home = {"x": 3, "y": 5}
    assert _samples(Counter(["x", "y", "y"]), home) == "sample 3, sample 5, sample 5"
    text = _samples(Counter(["x", "?", "!", "!"]), home)
    assert text == "sample 3, 3 not in the data set as rank 0 reads it"
    assert _samples(Counter(dict.fromkeys("abc", 1)), {}).startswith("3 not in the data set")
