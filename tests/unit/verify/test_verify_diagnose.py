"""From a failing step to a cause: what planted faults (tests/processes) do not reach, decided on
made-up gradients, without any rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.commands.verify.compare import add_up
from gradsync.commands.verify.diagnose import (
    Scene,
    _micro_batch,
    common_ratio,
    diagnose,
    name_of_factor,
    ratio,
)
from gradsync.commands.verify.judge import Verdict, minority, samples_text
from gradsync.commands.verify.reference import MicroBatchResult
from gradsync.commands.verify.result import Cause, Finding, Kind, Result, listed
from gradsync.commands.verify.settings import Variant

WEIGHTS = (1.0, 2.0, 4.0, 4.0, 5.0)
OWNERS = (0, 0, 1, 1, 1)
Gradients = list[dict[str, Tensor]]


def results() -> list[MicroBatchResult]:
    generator = torch.Generator().manual_seed(1)
    return [
        MicroBatchResult(
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
    means = add_up(results()).means()
    return [{name: mean.float() for name, mean in means.items()} for _ in range(2)]


def scene(
    gradients: Gradients, *kinds: Kind, previous: Gradients | None = None, dtype: str = "fp32"
) -> Scene:
    kinds = kinds or (Kind.GRADIENT,)
    findings = [Finding(kind=kind, step=2, names=("a", "b")) for kind in kinds]
    documents: list[dict[str, Any]] = [
        {
            "norm": None,
            "micro_batches": [
                {"index": i, "weight": WEIGHTS[i]} for i in range(5) if OWNERS[i] == rank
            ],
        }
        for rank in range(2)
    ]
    return Scene(
        verdict=Verdict(findings),
        results=results(),
        documents=documents,
        gradients=gradients,
        previous=previous or [{}, {}],
        dtype=dtype,
        has_batch_norm=True,
        passes=lambda variant: False,
    )


def run(made: Scene, passes: Callable[[Variant], bool] = lambda variant: False) -> Result:
    made.passes = passes
    result = Result(strategy="naive", world_size=2, model="mlp", dtype="fp32", promise="rounding")
    result.explain(*diagnose(made))
    result.tried = made.tried
    return result


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2.0, "2, the number of ranks: never divided by it"),
        (0.5, "1/2: divided by the number of ranks once more"),
        (16.0, "16, the number of targets: a sum, not a mean"),
        (0.0625, "1/16: divided by the number of targets twice"),
        (5.0, "5, the number of micro-batches"),
        (0.2, "1/5: divided by the number of micro-batches as well"),
        (7.5, "7.5"),
    ],
)
def test_a_constant_factor_is_scaling(factor: float, words: str) -> None:
    wrong = [{name: factor * g for name, g in each.items()} for each in right()]
    found = run(scene(wrong))
    assert found.cause == Cause.LOSS_SCALING
    assert words in found.sentence


@pytest.mark.parametrize(("sign", "word"), [(-1, "missing"), (1, "twice")])
def test_a_micro_batch_lost_or_double(sign: int, word: str) -> None:
    lost = results()[3]
    wrong = [
        {name: g + sign * lost.gradient[name] / sum(WEIGHTS) for name, g in each.items()}
        for each in right()
    ]
    found = run(scene(wrong))
    assert found.cause == Cause.DATA
    assert f"micro-batch 3 is {word}" in found.sentence
    assert found.ranks == [1]


def test_an_absent_gradient() -> None:
    found = run(scene([{"a": each["a"]} for each in right()]))
    assert (found.cause, found.names) == (Cause.UNSYNCHRONISED, ["b"])
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


def _noisy(size: float) -> Gradients:
    """Off by a share of each parameter's norm, not of each element."""
    generator = torch.Generator().manual_seed(3)
    wrong = {}
    for name, g in right()[0].items():
        noise = torch.randn(g.shape, generator=generator)
        wrong[name] = g + size * g.norm() * noise / noise.norm()
    return [wrong, wrong]


@pytest.mark.parametrize("kind", [Kind.GRADIENT, Kind.NORM, Kind.GRADIENT_REPLICAS])
@pytest.mark.parametrize("other", [Kind.LOSS, Kind.REPLICAS, Kind.BUFFERS, Kind.UPDATE])
def test_gradients_are_only_called_right_when_they_are(kind: Kind, other: Kind) -> None:
    found = run(scene(_noisy(0.3), kind, other))
    assert found.cause == Cause.UNKNOWN
    assert " right" not in found.sentence
    assert kind.value in found.sentence


def test_every_sentence_says_what_why_and_what_to_do() -> None:
    result = run(scene(right(), Kind.LOSS))
    for kind in Kind:
        for cause in Cause:
            finding = Finding(kind=kind, step=3, names=("w",), ranks=(1,))
            result.explain(cause, finding, "because")
            words = rf"step 3, 'w', rank 1: {kind.value}; {cause.value}: because\. [A-Z].*\."
            assert re.fullmatch(words, result.sentence)


def test_ratio_needs_the_same_direction() -> None:
    a = torch.randn(100)
    assert ratio(3 * a, a) == pytest.approx(3.0)
    assert ratio(a + 0.1 * torch.randn(100), a) is None
    assert ratio(torch.zeros(3), a[:3]) is None
    assert ratio(a[:3], torch.zeros(3)) is None
    assert ratio(torch.full((3,), float("nan")), a[:3]) is None
    assert common_ratio({"a": a}, {"a": a, "b": a}) is None  # a missing one is no match
    assert _micro_batch(scene(right())) is None


def test_a_factor_of_one_has_no_name() -> None:
    named = name_of_factor(1.0, world_size=1, weight=1.0, own_weight=1.0, num_micro_batches=1)
    assert named == "1"


def test_minority() -> None:
    assert minority(["x", "x", "x"]) == ()
    assert minority(["x", "y", "x"]) == (1,)
    assert minority(["x", "y"]) == (1,)
    assert minority(["y", "x", "x"]) == (0,)


def test_words() -> None:
    assert listed(("a", "b")) == "'a', 'b'"
    assert listed(tuple("abcde")) == "'a', 'b', 'c' and 2 more"


def test_samples_that_nobody_knows_are_counted() -> None:
    home = {"x": 3, "y": 5}
    assert samples_text(Counter(["x", "y", "y"]), home) == "sample 3, sample 5, sample 5"
    text = samples_text(Counter(["x", "?", "!", "!"]), home)
    assert text == "sample 3, 3 not in the data set as rank 0 reads it"
    assert samples_text(Counter(dict.fromkeys("abc", 1)), {}).startswith("3 not in the data set")
