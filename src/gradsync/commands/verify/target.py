"""Try the user's problem on one micro-batch before any rank starts: a mistake is one line."""

from __future__ import annotations

import math

import torch
from torch.utils.data import default_collate

from gradsync.commands.verify.problem import kept_randomness, users_code
from gradsync.commands.verify.run import Task
from gradsync.commands.verify.settings import SEED, VerifySettings
from gradsync.data.micro_batch import make_micro_batch
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import seed_everything

_SAME_LOSS = 1e-2


def check_target(settings: VerifySettings, dtype: str) -> None:
    """Import, build and try the user's problem in this process; a ConfigError says what is wrong.

    A target that needs a process group is left to the ranks, which have one.
    """
    task = Task(strategy="naive", model="target", dtype=dtype, settings=settings)
    try:
        with kept_randomness():
            wrong = _wrong(task)
    except ConfigError as error:
        if "process group" not in str(error.__cause__):
            raise
        return
    if wrong:
        raise ConfigError(f"--target {settings.target}: {wrong}")


def _wrong(task: Task) -> str:
    target, problem = task.settings.target, task.build()

    def loss(times: int) -> torch.Tensor:
        """Of the first samples, each `times` times, []."""
        seed_everything(SEED)
        count = min(len(problem.dataset), task.settings.micro_batch_size)
        samples = [problem.dataset[index] for index in range(count)]
        micro_batch = make_micro_batch(
            default_collate(samples * times),
            index=0,
            step=0,
            num_samples=len(samples) * times,
            is_last=True,
            device=torch.device("cpu"),
        )
        with task.autocast():
            return problem.loss_sum(problem.model(micro_batch.inputs), micro_batch.targets)

    with users_code(target):
        first = loss(1)
        first.backward()
        again = loss(1)
    # The run and its reference each need a separate model.
    own = {id(parameter) for parameter in problem.model.parameters() if parameter.requires_grad}
    if any(id(parameter) in own for parameter in task.build().model.parameters()):
        return "the factory must build a new model each time it is called"
    if not torch.allclose(first, again, equal_nan=True):
        return (
            "the same micro-batch gives something else when it is run again, with all generators "
            "seeded: something is kept between forwards, or the data set draws by itself"
        )
    # Every sample twice gives twice the loss, unless `loss_sum` is a mean; in evaluation mode, so
    # that neither dropout nor BatchNorm makes a difference. Other ratios are accepted: a
    # contrastive loss is no sum over samples.
    problem.model.eval()
    try:
        with torch.no_grad():
            once, twice = float(loss(1)), float(loss(2))
    except Exception:
        return ""  # some models give other results in evaluation mode: then nothing is known
    if once and math.isfinite(once) and math.isclose(once, twice, rel_tol=_SAME_LOSS):
        return "loss scaling: loss_sum is a mean; use reduction='sum'"
    return ""
