"""One leaf of the user's problem, tried before any rank starts: mistakes cost a line, not a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from gradsync.data.leaf import make_leaf
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import seed_everything, seed_leaf
from gradsync.verify.compare import DTYPE_NAMES
from gradsync.verify.plan import Settings
from gradsync.verify.problem import Problem, described, kept_randomness, users_code
from gradsync.verify.record import sample_digests
from gradsync.verify.run import Task

_READ_TWICE = 8
_SAME_LOSS = 1e-2
_STEP_RAISED = "a step on one leaf raised"


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
    problem = task.build()
    _refuse(settings, _wrong_model(problem.model) or _wrong_copy(problem, task.build()))
    total = len(problem.dataset.dataset)
    if settings.num_samples is not None and settings.num_samples > total:
        raise ConfigError(f"--num-samples {settings.num_samples}, but the data set has {total}")
    count = min(total, max(settings.leaf_size, _READ_TWICE))
    samples = _read(problem.dataset.dataset, count, settings)[: settings.leaf_size]
    seed_everything(settings.seed)
    before = dict(problem.model.named_parameters())
    with users_code(settings.target, _STEP_RAISED):
        loss = _loss(problem, task, samples)
    _refuse(settings, _wrong_loss(loss))
    with users_code(settings.target, _STEP_RAISED):
        loss.backward()
    _refuse(settings, _late_parameter(before, problem.model) or _is_mean(problem, task, samples))


def _refuse(settings: Settings, wrong: str) -> None:
    """Raise `wrong` as an error, if it says anything."""
    if wrong:
        raise ConfigError(f"--target {settings.target}: {wrong}")


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


def _read(dataset: Any, count: int, settings: Settings) -> list[Any]:
    """The first samples, each read twice, with torch's generators seeded as the loader does it."""
    samples = []
    for index in range(count):
        with users_code(settings.target, f"sample {index} cannot be read:"):
            seed_leaf(settings.seed, 0, index)
            sample = dataset[index]
            seed_leaf(settings.seed, 0, index)
            again = dataset[index]
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            _refuse(settings, f"a sample must be a pair (input, target), got {described(sample)}")
        samples.append(sample)
        with users_code(settings.target, "samples cannot be collated:"):
            digests = [sample_digests(default_collate([each]), 1) for each in (sample, again)]
            default_collate(samples)
        if digests[0] != digests[1]:
            found = "data: the data set gives another sample each time it is read"
            _refuse(settings, f"{found}; seed the augmentation by index")
    return samples


def _loss(problem: Problem, task: Task, samples: list[Any]) -> Any:
    leaf = make_leaf(
        default_collate(samples),
        index=0,
        step=0,
        num_samples=len(samples),
        is_last=True,
        device=torch.device("cpu"),
    )
    with task.autocast():
        return problem.loss_sum(problem.model(leaf.inputs), leaf.targets)


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
