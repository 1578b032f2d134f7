"""Try the user's problem on one leaf before any rank starts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from gradsync.commands.verify.problem import Problem
from gradsync.commands.verify.record import DTYPE_NAMES, sample_digests
from gradsync.commands.verify.run import Task
from gradsync.commands.verify.target import described, kept_randomness, refuse, users_code
from gradsync.data.micro_batch import make_micro_batch
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import seed_everything, seed_micro_batch

_READ_TWICE = 8
_SAME_LOSS = 1e-2


def check_target(task: Task) -> None:
    """Import, build and try the user's problem in this process; a ConfigError says what is wrong.

    A target that needs a process group is left to the ranks, which have one.
    """
    try:
        with kept_randomness():
            _check(task)
    except ConfigError as error:
        if "process group" not in str(error.__cause__):
            raise


def _check(task: Task) -> None:
    settings, target = task.settings, task.settings.target
    problem = task.build()
    refuse(target, _wrong_model(problem.model))
    # The run and its reference each need a separate model.
    own = {id(parameter) for parameter in problem.model.parameters() if parameter.requires_grad}
    if any(id(parameter) in own for parameter in task.build().model.parameters()):
        refuse(target, "the factory must build a new model each time it is called")
    dataset = problem.dataset.dataset
    if settings.num_samples is not None and settings.num_samples > len(dataset):
        raise ConfigError(
            f"--num-samples {settings.num_samples}, but the data set has {len(dataset)}"
        )
    count = min(len(dataset), max(settings.leaf_size, _READ_TWICE))
    samples = _read_twice(dataset, count, task)[: settings.leaf_size]
    seed_everything(settings.seed)
    before = dict(problem.model.named_parameters())
    raised = "a step on one micro-batch raised"
    with users_code(target, raised):
        loss = _loss(problem, task, samples)
    refuse(target, _wrong_loss(loss))
    with users_code(target, raised):
        loss.backward()
    refuse(target, _late_parameter(before, problem.model) or _is_mean(problem, task, samples))


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


def _read_twice(dataset: Any, count: int, task: Task) -> list[Any]:
    """The first samples, each read twice, with torch's generators seeded as in the loader."""
    samples, target = [], task.settings.target
    for index in range(count):
        read = []
        with users_code(target, f"sample {index} cannot be read:"):
            for _ in range(2):
                seed_micro_batch(task.settings.seed, 0, index)
                read.append(dataset[index])
        sample = read[0]
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            refuse(target, f"a sample must be a pair (input, target), got {described(sample)}")
        samples.append(sample)
        with users_code(target, "samples cannot be collated:"):
            first, again = (sample_digests(default_collate([each]), 1) for each in read)
            default_collate(samples)
        if first != again:
            found = "data: the data set gives another sample each time it is read"
            refuse(target, f"{found}; seed the augmentation by index")
    return samples


def _loss(problem: Problem, task: Task, samples: list[Any]) -> Any:
    leaf = make_micro_batch(
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
    """The optimizer and `gs.replicate` precede the first forward: they miss later parameters."""
    for name, parameter in model.named_parameters():
        if before.get(name) is not parameter:
            done = "replaces" if name in before else "makes"
            where = "make it in __init__, or run a batch through the model in the factory"
            return f"the forward {done} parameter {name!r}, which no optimizer knows: {where}"
    return ""


def _is_mean(problem: Problem, task: Task, samples: list[Any]) -> str:
    """A leaf with every sample twice has twice the loss, unless `loss_sum` is a mean. This is tried
    in evaluation mode, so that neither dropout nor BatchNorm makes a difference. Ratios other than
    one are accepted: a contrastive loss is no sum over samples."""
    problem.model.eval()
    losses = []
    try:
        with torch.no_grad():
            for tried in (samples, samples * 2):
                seed_everything(task.settings.seed)
                losses.append(float(_loss(problem, task, tried)))
    except Exception:
        return ""  # some models give other results in evaluation mode: then nothing is known
    once, twice = losses
    if once and math.isfinite(once) and math.isclose(once, twice, rel_tol=_SAME_LOSS):
        return "loss scaling: loss_sum is a mean; use reduction='sum'"
    return ""
