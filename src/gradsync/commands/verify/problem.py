"""The problems to train: verify's three, or the user's.

Each contains what goes wrong in practice: unequal weights (targets that count for nothing), a last
micro-batch of one sample, dropout, and

    mlp    a tied weight, a frozen part, a part that only some micro-batches use, one used by almost
           none
    conv   GroupNorm and BatchNorm
    gpt    the library's own decoder, embedding and head tied
"""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset, default_collate

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.models.gpt import loss_sum as token_loss_sum
from gradsync.commands.verify.settings import SEED, VerifySettings
from gradsync.data.micro_batch import IGNORED_TARGET, make_micro_batch
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import kept_generators, seed_everything, stream_seed

LossSum = Callable[[Any, Any], Tensor]
_CLASSES = 10
_SAME_LOSS = 1e-2
_NOT_THE_USERS = (
    *(str(Path(file).parent) for file in (torch.__file__, importlib.__file__)),
    str(Path(__file__).parents[2]),
    "<frozen",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A model, its data, and the loss between them."""

    model: nn.Module  # maps the inputs of a batch to an output
    dataset: Any  # map-style; samples are (input, target)
    loss_sum: LossSum  # `loss_sum(output, target)`: [], *summed* over targets
    uses_all: bool = True  # False if some micro-batch leaves a parameter without gradient


def build_problem(name: str, settings: VerifySettings) -> Problem:
    """Build the problem called `name`, the same on every rank.

    The global generators are seeded before a factory's module is imported, which may draw data, and
    again before the factory is called: only the first call imports.
    """
    seed = stream_seed(SEED, "verify")
    with kept_generators():
        seed_everything(seed)
        factory = find_factory(settings.target) if name == "target" else None
        seed_everything(seed)
        if factory is None:
            return _OWN[name](settings)
        with users_code(settings.target):
            model, dataset, loss_sum = factory()
            if not isinstance(model, nn.Module):
                raise TypeError(f"{model!r} is no torch.nn.Module")
            # A data set that is too small repeats, so that every step runs.
            indices = [index % len(dataset) for index in range(settings.dataset_size)]
    data = Subset(dataset, indices)
    return Problem(model=model, dataset=data, loss_sum=loss_sum, uses_all=False)


def check_target(settings: VerifySettings) -> None:
    """Try the user's problem on one micro-batch, in fp32, before any rank starts; ConfigError says
    what is wrong. A target that needs a process group is left to the ranks, which have one."""
    with kept_generators():
        try:
            problem = build_problem("target", settings)
            with users_code(settings.target):
                _trial_loss(problem, settings, 1).backward()
            again = build_problem("target", settings)
        except ConfigError as error:
            if "process group" not in str(error.__cause__):
                raise
            return
        # Every sample twice gives twice the loss, unless `loss_sum` is a mean; in evaluation mode,
        # so that neither dropout nor BatchNorm makes a difference. Other ratios are accepted: a
        # contrastive loss is no sum over samples.
        problem.model.eval()
        once = twice = math.nan
        with suppress(Exception), torch.no_grad():  # some models give something else there
            once, twice = (float(_trial_loss(problem, settings, times)) for times in (1, 2))
    # The run and its reference each need a separate model.
    own = {id(parameter) for parameter in problem.model.parameters() if parameter.requires_grad}
    wrong = ""
    if any(id(parameter) in own for parameter in again.model.parameters()):
        wrong = "the factory must build a new model each time it is called"
    elif 0 < abs(once) < math.inf and math.isclose(once, twice, rel_tol=_SAME_LOSS):
        wrong = "loss scaling: loss_sum is a mean; use reduction='sum'"
    if wrong:
        raise ConfigError(f"--target {settings.target}: {wrong}")


def _trial_loss(problem: Problem, settings: VerifySettings, times: int) -> Tensor:
    """Loss of the first samples, each `times` times, []."""
    seed_everything(SEED)
    count = min(len(problem.dataset), settings.micro_batch_size)
    samples = [problem.dataset[index] for index in range(count)] * times
    micro_batch = make_micro_batch(
        default_collate(samples),
        index=0,
        step=0,
        num_samples=len(samples),
        is_last=True,
        device=torch.device("cpu"),
    )
    return problem.loss_sum(problem.model(micro_batch.inputs), micro_batch.targets)


def find_factory(target: str) -> Callable[[], Any]:
    """The function that `pkg.module:factory` names, or a ConfigError. Its module is imported, also
    from the working folder, as `python -m` does."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--target {target!r}: expected pkg.module:factory")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with users_code(target):
        return getattr(importlib.import_module(module_name), name)


@contextmanager
def users_code(target: str) -> Generator[None]:
    """Report an error in the user's code in one line: `--target T: KeyError: 'x' (data.py:12)`, by
    the innermost place outside torch and gradsync."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a module that exits would end verify silently
        places = [
            (frame.filename, frame.lineno)
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(_NOT_THE_USERS)
        ]
        place = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"--target {target}: {said}{place}") from error


class MLP(nn.Module):
    """[B, 12] -> [B, 10]; tied weights, a frozen layer, a branch that some micro-batches use, and
    one that only a single sample uses: in most steps none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.inner = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.inner.weight
        self.branch = nn.Linear(16, 16, bias=False)
        self.rare = nn.Linear(16, 16, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, _CLASSES)

    def forward(self, x_BC: Tensor) -> Tensor:
        """Logits."""
        y_BC = torch.tanh(self.first(x_BC))
        y_BC = y_BC + 0.5 * torch.tanh(self.frozen(y_BC))
        y_BC = y_BC + self.again(self.dropout(F.relu(self.inner(y_BC))))
        if float(x_BC.detach().sum()) > 0:
            y_BC = y_BC + self.branch(y_BC)
        if len(x_BC) == 1:
            y_BC = y_BC + self.rare(y_BC)
        return self.head(y_BC)


def class_loss_sum(logits_BV: Tensor, targets_B: Tensor) -> Tensor:
    """Cross-entropy summed over the targets that count, in fp32 or wider."""
    logits_BV = logits_BV.float() if logits_BV.dtype == torch.bfloat16 else logits_BV
    return F.cross_entropy(logits_BV, targets_B, ignore_index=IGNORED_TARGET, reduction="sum")


def _gpt_loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    if logits_BTV.dtype == torch.float64:
        return class_loss_sum(logits_BTV.flatten(0, 1), targets_BT.flatten())
    return token_loss_sum(logits_BTV, targets_BT)


def _mlp(settings: VerifySettings) -> Problem:
    inputs = torch.randn(settings.dataset_size, 12)
    targets = _drop_targets((inputs @ torch.randn(12, _CLASSES)).argmax(1))
    return Problem(
        model=MLP(), dataset=TensorDataset(inputs, targets), loss_sum=class_loss_sum, uses_all=False
    )


def _conv(settings: VerifySettings) -> Problem:
    classes = torch.randint(_CLASSES, (settings.dataset_size,))
    images = torch.randn(_CLASSES, 1, 8, 8)[classes]
    images = images + 0.3 * torch.randn(images.shape)
    layers = OrderedDict[str, nn.Module](
        first=nn.Conv2d(1, 8, 3, padding=1),
        group_norm=nn.GroupNorm(2, 8),
        first_relu=nn.ReLU(),
        second=nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        batch_norm=nn.BatchNorm2d(8),
        second_relu=nn.ReLU(),
        flatten=nn.Flatten(),
        dropout=nn.Dropout(0.1),
        head=nn.Linear(8 * 16, _CLASSES),
    )
    return Problem(
        model=nn.Sequential(layers),
        dataset=TensorDataset(images, _drop_targets(classes)),
        loss_sum=class_loss_sum,
    )


def _gpt(settings: VerifySettings) -> Problem:
    length, vocabulary = 12, 48
    start = torch.randint(vocabulary, (settings.dataset_size, 1))
    tokens = (start + 5 * torch.arange(length + 1)) % vocabulary
    targets = tokens[:, 1:].clone()
    lengths = torch.randint(2, length + 1, (settings.dataset_size, 1))
    targets[torch.arange(length) >= lengths] = IGNORED_TARGET  # texts of different lengths
    config = GPTConfig(
        n_layer=2,
        n_head=2,
        n_embd=32,
        hidden_dim=64,
        vocab_size=vocabulary,
        block_size=length,
        dropout=0.1,
    )
    return Problem(
        model=GPT(config, seed=SEED),
        dataset=TensorDataset(tokens[:, :-1].contiguous(), targets),
        loss_sum=_gpt_loss_sum,
    )


def _drop_targets(targets_N: Tensor) -> Tensor:
    """About every fifth target counts for nothing, so that micro-batches have different weights."""
    dropped = torch.rand(targets_N.shape) < 0.2
    return torch.where(dropped, torch.full_like(targets_N, IGNORED_TARGET), targets_N)


_OWN: dict[str, Callable[[VerifySettings], Problem]] = {"mlp": _mlp, "conv": _conv, "gpt": _gpt}
