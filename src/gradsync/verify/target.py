"""The user's own problem: found, called, and tried on one leaf before any rank starts.

Mistakes in it cost a line, `--target T: what is wrong`, not a run.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset, default_collate

from gradsync.data.leaf import make_leaf
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import seed_everything, seed_leaf
from gradsync.verify.record import DTYPE_NAMES, sample_digests

if TYPE_CHECKING:
    from gradsync.verify.problem import Problem
    from gradsync.verify.run import Task

_READ_TWICE = 8
_SAME_LOSS = 1e-2
_NOT_THE_USERS = (
    *(str(Path(file).parent) for file in (torch.__file__, importlib.__file__)),
    str(Path(__file__).parents[1]),
    "<frozen",
)


@contextmanager
def kept_randomness() -> Generator[None]:
    """Put torch's, numpy's and Python's global generators back at the end: a check must not change
    what is drawn after it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _refuse(target: str, wrong: str) -> None:
    """Raise `wrong` as a ConfigError, if it says anything."""
    if wrong:
        raise ConfigError(f"--target {target}: {wrong}")


@contextmanager
def _users_code(target: str, failure: str) -> Generator[None]:
    """Say what the user's code raises inside in a line: `--target T: FAILURE KeyError: …`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a module that exits would end verify silently
        raise ConfigError(f"--target {target}: {failure} {_in_a_line(error)}") from error


def _in_a_line(error: BaseException) -> str:
    """`KeyError: 'x' (data.py:12)`: the innermost place that is neither torch's nor ours."""
    places = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    said = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        said, places = error.msg, [(error.filename, error.lineno)]
    place = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
    return f"{type(error).__name__}: {' '.join(said.split())}{place}"


def _described(value: Any) -> str:
    """A wrong value in a few words: its type, and what is in it."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, list(value)[:4]))}"
    return type(value).__name__


def find_factory(target: str) -> Callable[[], Any]:
    """The function that `pkg.module:factory` names, or a ConfigError; its module is imported, from
    the working folder too, as `python -m` has it."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--target {target!r}: expected pkg.module:factory")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _users_code(target, "importing it raised"):
        module = importlib.import_module(module_name)
    factory = getattr(module, name, None)
    if not callable(factory):
        wrong = f"{module_name} has no {name!r}" if factory is None else f"{name} is not callable"
        raise ConfigError(f"--target {target}: {wrong}")
    return factory


def parts_of(target: str, factory: Callable[[], Any]) -> tuple[nn.Module, Any, Callable[..., Any]]:
    """The (model, data set, loss_sum) that `factory` returns; ConfigError for anything else."""
    with _users_code(target, "the factory raised"):
        made = factory()
    _refuse(target, _wrong_parts(made))
    return made


def _wrong_parts(made: Any) -> str:
    if not (isinstance(made, tuple) and len(made) == 3):
        return f"the factory must return (model, data set, loss_sum), got {_described(made)}"
    model, dataset, loss_sum = made
    if not isinstance(model, nn.Module):
        return f"the model must be a torch.nn.Module, got {_described(model)}"
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        wanted = "map-style, with a length and samples by index"
        return f"the data set must be {wanted}; got {_described(dataset)}"
    if not len(dataset):
        return "the data set has no samples"
    return "" if callable(loss_sum) else f"loss_sum must be a function, got {_described(loss_sum)}"


# -- tried on one leaf ----------------------------------------------------------------------------


def check_target(task: Task) -> None:
    """Import, build and try the user's problem, in this process; a ConfigError says what is wrong.

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
    _refuse(target, _wrong_model(problem.model))
    # The run and what it is compared with each need a model of their own.
    own = {id(parameter) for parameter in problem.model.parameters() if parameter.requires_grad}
    if any(id(parameter) in own for parameter in task.build().model.parameters()):
        _refuse(target, "the factory must build a new model each time it is called")
    dataset = problem.dataset.dataset
    if settings.num_samples is not None and settings.num_samples > len(dataset):
        raise ConfigError(
            f"--num-samples {settings.num_samples}, but the data set has {len(dataset)}"
        )
    count = min(len(dataset), max(settings.leaf_size, _READ_TWICE))
    samples = _read_twice(dataset, count, task)[: settings.leaf_size]
    seed_everything(settings.seed)
    before = dict(problem.model.named_parameters())
    raised = "a step on one leaf raised"
    with _users_code(target, raised):
        loss = _loss(problem, task, samples)
    _refuse(target, _wrong_loss(loss))
    with _users_code(target, raised):
        loss.backward()
    _refuse(target, _late_parameter(before, problem.model) or _is_mean(problem, task, samples))


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
    """The first samples, each read twice, with torch's generators seeded as the loader does it."""
    samples, target = [], task.settings.target
    for index in range(count):
        read = []
        with _users_code(target, f"sample {index} cannot be read:"):
            for _ in range(2):
                seed_leaf(task.settings.seed, 0, index)
                read.append(dataset[index])
        sample = read[0]
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            _refuse(target, f"a sample must be a pair (input, target), got {_described(sample)}")
        samples.append(sample)
        with _users_code(target, "samples cannot be collated:"):
            first, again = (sample_digests(default_collate([each]), 1) for each in read)
            default_collate(samples)
        if first != again:
            found = "data: the data set gives another sample each time it is read"
            _refuse(target, f"{found}; seed the augmentation by index")
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
        return f"loss_sum must return a tensor, got {_described(loss)}"
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
    """A leaf with every sample twice has twice the loss, unless `loss_sum` is a mean: tried in
    evaluation mode, so that neither dropout nor BatchNorm tells the two apart. Other ratios than
    one are left alone: a contrastive loss is no sum over samples."""
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
