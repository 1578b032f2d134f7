"""One leaf of the user's problem, tried before any rank starts: mistakes cost a line, not a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from gradsync.data.leaf import Leaf, make_leaf
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import seed_everything, seed_leaf
from gradsync.verify.exact import DTYPE_NAMES
from gradsync.verify.plan import Settings
from gradsync.verify.problem import Problem
from gradsync.verify.randomness import kept_randomness
from gradsync.verify.runner import Task, autocast
from gradsync.verify.target import RAISED, described, in_a_line
from gradsync.verify.trace import sample_digests

_READ_TWICE = 8
_SAME_LOSS = 1e-2


def check_target(settings: Settings, dtype: str = "fp32") -> None:
    """Import, build and try the user's problem, in this process.

    A target that needs a process group is left to the ranks, which have one.

    Args:
        settings: with `target`; nothing is done without.
        dtype: in which it will run: fp64, fp32 or bf16.

    Raises:
        ConfigError: something is wrong with it; one line says what.
    """
    if not settings.target:
        return
    try:
        with kept_randomness():
            _check(Task(strategy="naive", model="target", dtype=dtype, settings=settings))
    except ConfigError as error:
        if "process group" not in str(error.__cause__):
            raise


def _check(task: Task) -> None:
    settings = task.settings
    named = f"--target {settings.target}: "
    problem = task.build()
    wrong = _wrong_model(problem.model) or _wrong_copy(problem, task.build())
    if wrong:
        raise ConfigError(named + wrong)
    total = len(problem.dataset.dataset)
    if settings.num_samples is not None and settings.num_samples > total:
        raise ConfigError(f"--num-samples {settings.num_samples}, but the data set has {total}")
    count = min(total, max(settings.leaf_size, _READ_TWICE))
    samples = _read(problem, count, settings.seed, named)[: settings.leaf_size]
    seed_everything(settings.seed)
    before = dict(problem.model.named_parameters())
    try:
        loss = _loss(problem, task, samples)
        wrong = _wrong_loss(loss)
        if not wrong:
            loss.backward()
    except RAISED as error:
        raise ConfigError(f"{named}a step on one leaf raised {in_a_line(error)}") from error
    wrong = wrong or _late_parameter(before, problem.model) or _is_mean(problem, task, samples)
    if wrong:
        raise ConfigError(named + wrong)


def _wrong_model(model: nn.Module) -> str:
    trained = 0
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            return f"{name!r} has no shape yet: run a batch through the model in the factory"
        trained += parameter.requires_grad
        if parameter.requires_grad and parameter.dtype not in DTYPE_NAMES:
            dtype = str(parameter.dtype).removeprefix("torch.")
            return f"{name!r} is {dtype}; verify knows {', '.join(DTYPE_NAMES.values())}"
    return "" if trained else "no parameter of the model is trained"


def _wrong_copy(problem: Problem, other: Problem) -> str:
    """The run and what it is compared with each need a model of their own."""
    own = {id(parameter) for parameter in problem.model.parameters() if parameter.requires_grad}
    if any(id(parameter) in own for parameter in other.model.parameters()):
        return "the factory must build a new model each time it is called"
    return ""


def _read(problem: Problem, count: int, seed: int, named: str) -> list[Any]:
    """The first samples, each read twice, with torch's generators seeded as the loader does it."""
    samples = []
    for index in range(count):
        try:
            seed_leaf(seed, 0, index)
            sample = problem.dataset.dataset[index]
            seed_leaf(seed, 0, index)
            again = problem.dataset.dataset[index]
        except RAISED as error:
            text = f"{named}sample {index} cannot be read: {in_a_line(error)}"
            raise ConfigError(text) from error
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            needed = "a sample must be a pair (input, target)"
            raise ConfigError(f"{named}{needed}, got {described(sample)}")
        samples.append(sample)
        try:
            digests = [sample_digests(default_collate([each]), 1) for each in (sample, again)]
            default_collate(samples)
        except RAISED as error:
            text = f"{named}samples cannot be collated: {in_a_line(error)}"
            raise ConfigError(text) from error
        if digests[0] != digests[1]:
            found = "data: the data set gives another sample each time it is read"
            raise ConfigError(f"{named}{found}; seed the augmentation by index")
    return samples


def _loss(problem: Problem, task: Task, samples: list[Any]) -> Any:
    leaf = _leaf(samples)
    with autocast(task.used_dtype):
        return problem.loss_sum(problem.model(leaf.inputs), leaf.targets)


def _leaf(samples: list[Any]) -> Leaf:
    return make_leaf(
        default_collate(samples),
        index=0,
        step=0,
        num_samples=len(samples),
        is_last=True,
        device=torch.device("cpu"),
    )


def _wrong_loss(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return f"loss_sum must return a tensor, got {described(loss)}"
    if loss.ndim:
        return f"loss_sum must return a single number (shape []), got shape {list(loss.shape)}"
    if not loss.requires_grad:
        return "what loss_sum returns has no gradient: it was detached, or made of plain numbers"
    return ""


def _late_parameter(before: dict[str, nn.Parameter], model: nn.Module) -> str:
    """The optimizer and `gs.replicate` come before the first forward: they would not know it."""
    for name, parameter in model.named_parameters():
        if before.get(name) is not parameter:
            done = "replaces" if name in before else "makes"
            where = "make it in __init__, or run a batch through the model in the factory"
            return f"the forward {done} parameter {name!r}, which no optimizer knows: {where}"
    return ""


def _is_mean(problem: Problem, task: Task, samples: list[Any]) -> str:
    """A leaf with every sample twice has twice the loss, unless `loss_sum` is a mean.

    In evaluation mode, so that neither dropout nor BatchNorm tells the two apart. Other ratios
    than one are left alone: a contrastive loss is no sum over samples.
    """
    problem.model.eval()
    losses = []
    try:
        with torch.no_grad():
            for tried in (samples, samples * 2):
                seed_everything(task.settings.seed)
                losses.append(float(_loss(problem, task, tried)))
    except Exception:
        return ""  # some models give something else in evaluation mode: then nothing is known
    once, twice = losses
    if once and math.isfinite(once) and math.isclose(once, twice, rel_tol=_SAME_LOSS):
        return "loss scaling: loss_sum is a mean; use reduction='sum'"
    return ""
