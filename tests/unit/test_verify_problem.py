"""What is trained, what is recorded of it, and the one-rank reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradsync.comm.groups import SingleCommunicator
from gradsync.errors import ConfigError
from gradsync.verify.plan import MODELS, PLAIN, Settings, Variant
from gradsync.verify.problem import build_problem, find_factory
from gradsync.verify.record import digest, digests_of, sample_digests, trace_leaf
from gradsync.verify.reference import Reference
from gradsync.verify.run import Task, _disturb, make_loader, read, save, train_traced

SETTINGS = Settings(num_steps=2)


def factory() -> tuple[nn.Module, TensorDataset, object]:
    """A user's own problem, with random weights and data."""
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 2))
    return nn.Sequential(nn.Linear(3, 2), nn.Dropout()), data, lambda o, t: (o - t).square().sum()


def not_a_triple() -> int:
    return 3


TARGET = replace(SETTINGS, target="unit.test_verify_problem:factory")


@pytest.mark.parametrize("name", MODELS)
def test_a_problem_is_the_same_every_time(name: str) -> None:
    state = torch.get_rng_state()
    problems = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # whatever was drawn before does not matter
        problems.append(build_problem(name, SETTINGS))
    torch.set_rng_state(state)
    a, b = (dict(problem.model.state_dict()) for problem in problems)
    assert {k: digest(v) for k, v in a.items()} == {k: digest(v) for k, v in b.items()}
    assert len(problems[0].dataset) == SETTINGS.dataset_size
    for x, y in zip(problems[0].dataset, problems[1].dataset, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


def test_the_problems_have_what_goes_wrong_in_practice() -> None:
    mlp = build_problem("mlp", SETTINGS)
    names = [name for name, _ in mlp.model.named_parameters(remove_duplicate=False)]
    assert len(names) > len(list(mlp.model.parameters()))  # tied
    assert any(not parameter.requires_grad for parameter in mlp.model.parameters())
    results = Reference(Task(strategy="naive", model="mlp", dtype="fp32", settings=SETTINGS), 1)
    leaves = results.leaf_results(0, results.start(), {})
    assert len({"branch.weight" in leaf.gradient for leaf in leaves}) == 2  # used by some
    assert len({leaf.weight for leaf in leaves}) > 1  # unequal weights
    last = results.leaf_results(1, results.start(), {})
    used = [["rare.weight" in leaf.gradient for leaf in step] for step in (leaves, last)]
    assert used == [[False] * 5, [False, True]]  # by nobody, then by one
    assert build_problem("conv", SETTINGS).has_batch_norm


def test_without_dropout_two_forwards_agree() -> None:
    for variant, same in ((PLAIN, False), (Variant(dropout=False), True)):
        problem = build_problem("gpt", SETTINGS, variant)
        tokens = problem.dataset[0][0][None]
        assert torch.equal(problem.model(tokens), problem.model(tokens)) is same


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    for variant, same in ((PLAIN, False), (Variant(frozen_batch_norm=True), True)):
        problem = build_problem("conv", SETTINGS, variant)
        before = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
        problem.model(torch.randn(4, 1, 8, 8))
        after = dict(problem.model.named_buffers())
        assert all(torch.equal(after[name], before[name]) for name in before) is same


def test_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build_problem("target", TARGET)
    assert len(problem.dataset) == TARGET.dataset_size
    again = build_problem("target", TARGET)
    assert torch.equal(problem.dataset[0][0], again.dataset[0][0])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "expected pkg.module:factory"),
        ("no_such_module:factory", "No module named 'no_such_module'$"),
        ("unit.test_verify_problem:missing", "has no 'missing'"),
        ("unit.test_verify_problem:SETTINGS", "is not callable"),
    ],
)
def test_a_target_that_cannot_be_found(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_factory(target)


def test_a_target_that_is_something_else() -> None:
    settings = replace(SETTINGS, target="unit.test_verify_problem:not_a_triple")
    with pytest.raises(ConfigError, match="must return"):
        build_problem("target", settings)


def test_a_factory_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_target.py").write_text("def factory():\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert find_factory("own_target:factory")() == 1


def test_variants_and_strategies_change_leaves_but_not_the_data() -> None:
    plain = task("mlp")
    one = replace(plain, variant=Variant(one_leaf_per_rank=True)).settings_for(3)
    equal = task("mlp", "fsdp").settings_for(3)
    assert (one.num_leaves, equal.num_leaves) == (3, 6)
    assert one.dataset_size == equal.dataset_size == SETTINGS.dataset_size
    assert equal.num_epochs is None
    assert plain.settings_for(3) is SETTINGS


def test_samples_are_known_by_their_contents() -> None:
    inputs, targets = torch.randn(3, 2), torch.tensor([0, 1, -100])
    first = sample_digests((inputs, targets), 3)
    assert len(set(first)) == 3
    assert sample_digests([inputs[1:], targets[1:]], 2) == first[1:]
    targets[0] = 1
    assert sample_digests((inputs, targets), 3)[0] != first[0]
    named = {"x": inputs, "mask": torch.ones(7)}
    assert len(set(sample_digests({"y": named}, 3))) == 3


def test_random_state_has_a_digest() -> None:
    leaf = Reference(task("mlp"), 1).leaves[0][0]
    torch.manual_seed(3)
    first = trace_leaf(leaf)
    torch.rand(1)
    assert trace_leaf(leaf).random != first.random
    torch.manual_seed(3)
    assert trace_leaf(leaf) == first


def task(model: str, strategy: str = "naive", dtype: str = "fp32") -> Task:
    return Task(strategy=strategy, model=model, dtype=dtype, settings=SETTINGS)


@pytest.mark.parametrize("model", MODELS)
def test_the_record_of_a_run(model: str) -> None:
    trace = train_traced(task(model), SingleCommunicator())
    assert [step.number for step in trace.steps] == [0, 1]
    assert [len(step.leaves) for step in trace.steps] == [5, 2]
    for step in trace.steps:
        assert set(step.gradient) == set(trace.trainable)
        assert {n: digest(t) for n, t in step.before.items()} == {
            n: digest(t) for n, t in step.at_step.items()
        }
        moved = [n for n in step.after if not torch.equal(step.after[n], step.before[n])]
        assert set(moved) == {n for n, g in step.gradient.items() if g is not None}
        assert digests_of(step)["after"] == digests_of(step)["updated"]
    assert set(trace.steps[0].after) == set(trace.steps[1].before)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_above_zero_start_from_other_weights(rank: int) -> None:
    """That is what makes a start that is not shared visible."""
    problem, untouched = build_problem("conv", SETTINGS), build_problem("conv", SETTINGS)
    _disturb(problem.model, rank)
    expected = untouched.model.state_dict()
    for name, tensor in problem.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name] + rank * tensor.is_floating_point())


def test_the_reference_is_plain_training() -> None:
    """Leaf by leaf sums and one whole batch agree; its record follows its own leaves."""
    reference = Reference(task("gpt", dtype="fp64"), 1)
    trace = reference.train()
    assert list(reference.traces[0]) == trace.steps[0].leaves
    results = reference.leaf_results(0, reference.start(), {})
    weight = sum(result.weight for result in results)
    total: Tensor = sum(result.gradient["norm.weight"] for result in results) / weight
    clipped = trace.steps[0].gradient["norm.weight"]
    norm = trace.steps[0].norm
    assert clipped is not None
    assert norm is not None
    torch.testing.assert_close(clipped * max(norm / 0.5, 1.0), total, rtol=1e-5, atol=0)


def test_the_reference_repeats_the_optimizers_step() -> None:
    reference = Reference(task("mlp"), 1)
    trace = reference.train()
    second = trace.steps[1]
    weights, state = reference.update(second.before, trace.state_before(1), second.gradient)
    assert all(torch.equal(weights[name], second.after[name]) for name in weights)
    assert all(torch.equal(state[name], second.state[name]) for name in state)


@pytest.mark.parametrize("strategy", ["naive", "invariant"])
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path, strategy: str) -> None:
    settings = replace(SETTINGS, num_steps=4)
    whole = train_traced(replace(task("mlp", strategy), settings=settings), SingleCommunicator())
    save(tmp_path, strategy, whole, 2)
    saved = read(tmp_path, SingleCommunicator())
    assert saved.strategy == strategy
    rest = train_traced(
        replace(task("mlp", strategy), settings=settings), SingleCommunicator(), saved=saved
    )
    assert [step.number for step in rest.steps] == [2, 3]
    for a, b in zip(rest.steps, whole.steps[2:], strict=True):
        assert digests_of(a) == digests_of(b)
    reference = Reference(replace(task("mlp", strategy), settings=settings), 1, saved)
    assert list(reference.leaves) == [2, 3]
    assert reference.traces[2] == whole.steps[2].leaves


def test_doubles_stay_doubles() -> None:
    trace = train_traced(task("conv", dtype="fp64"), SingleCommunicator())
    assert {tensor.dtype for tensor in trace.steps[0].after.values()} == {torch.float64}


def test_loaders_of_all_ranks_together_are_the_references() -> None:
    reference = Reference(task("mlp"), 1)
    problem = build_problem("mlp", SETTINGS)
    indices = []
    for rank in range(3):
        for step in make_loader(problem, SETTINGS, rank, 3):
            indices += [(step.number, leaf.index) for leaf in step]
    expected = [(n, leaf.index) for n, leaves in reference.leaves.items() for leaf in leaves]
    assert sorted(indices) == sorted(expected)
