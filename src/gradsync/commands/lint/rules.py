"""Known mistakes in data-parallel training scripts, with the reason and the cure for each."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gradsync.commands.lint import find
from gradsync.commands.lint.script import Script

Level = Literal["error", "warning", "note"]
"""Wrong results or a hang; wrong or slow in common cases; worth knowing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A mistake."""

    id: str
    level: Level
    says: str
    why: str
    fix: str
    find: Callable[[Script], Iterable[ast.AST]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A mistake and its place."""

    rule: Rule
    path: str
    line: int


_IGNORED = re.compile(r"#\s*gradsync:\s*ignore(?:\[([\w, ]+)\])?")


def lint(script: Script) -> list[Found]:
    """All mistakes, in line order."""
    found = []
    for rule in RULES:
        for node in rule.find(script):
            line = getattr(node, "lineno", 1)
            said = _IGNORED.search(script.lines[line - 1]) if line <= len(script.lines) else None
            if said is None or (said[1] and rule.id not in said[1].replace(",", " ").split()):
                found.append(Found(rule=rule, path=script.path, line=line))
    return sorted(set(found), key=lambda each: (each.line, each.rule.id))


RULES = (
    Rule(
        id="GS101",
        level="error",
        says="backward inside no_sync(), the forward outside",
        why="DDP decides in the forward whether this backward synchronises: this one does, and the "
        "gradients of the micro-batches before are averaged twice or not at all",
        fix="put the forward into the same `with model.no_sync():`",
        find=find.forward_outside_no_sync,
    ),
    Rule(
        id="GS102",
        level="error",
        says="require_backward_grad_sync is set between forward and backward",
        why="DDP reads it in the forward: set after it, it holds for the next micro-batch, and "
        "replicas drift apart",
        fix="set it before the forward, or use `with model.no_sync():` around both",
        find=find.flag_after_forward,
    ),
    Rule(
        id="GS103",
        level="warning",
        says="gradients are synchronised in every micro-batch",
        why="under accumulation only the last one needs it: the others send all gradients for "
        "nothing",
        fix="all but the last under `with model.no_sync():`, forward included",
        find=find.syncs_every_leaf,
    ),
    Rule(
        id="GS104",
        level="error",
        says="gradients add up over micro-batches, and nothing divides the loss by their number",
        why="each backward adds a whole mean: the step is as many times too long",
        fix="(loss / steps).backward(), or for the micro-batches of gs.loader sync.backward(loss, "
        "micro_batch) and sync.step(optimizer), which divide by the targets of all",
        find=find.not_divided,
    ),
    Rule(
        id="GS105",
        level="error",
        says="the optimizer steps after the first micro-batch",
        why="`i % steps == 0` is true for i = 0",
        fix="(i + 1) % steps == 0",
        find=find.fires_at_once,
    ),
    Rule(
        id="GS106",
        level="error",
        says="every backward is inside no_sync()",
        why="no gradient is ever averaged: each rank trains a model of its own",
        fix="the last micro-batch of a step outside of it, forward included",
        find=find.never_synchronised,
    ),
    Rule(
        id="GS107",
        level="error",
        says="gradients are clipped between sync.backward() and sync.step()",
        why="there they are sums of this rank's micro-batches, under most strategies not even in "
        ".grad: clipping does nothing, or something else on each number of ranks",
        fix="sync.step(optimizer, clip_norm=1.0), which clips the mean over all ranks",
        find=find.changed_sums,
    ),
    Rule(
        id="GS201",
        level="error",
        says="DistributedSampler without set_epoch",
        why="it shuffles by seed + epoch: without it every epoch has the same order",
        fix="sampler.set_epoch(epoch) at the beginning of each epoch",
        find=find.no_set_epoch,
    ),
    Rule(
        id="GS203",
        level="warning",
        says="a shuffled DataLoader without a sampler for the rank",
        why="each rank goes through all of the data: an epoch is as many epochs as there are ranks",
        fix="sampler=DistributedSampler(dataset), or gs.loader(dataset, world, …)",
        find=find.whole_data_on_each_rank,
    ),
    Rule(
        id="GS204",
        level="warning",
        says="a batch is divided by the number of ranks and rounded down",
        why="10 // 4 is 2: the global batch shrinks without a word, and depends on the ranks",
        fix="refuse a remainder, or let shares differ and weigh them (gs.loader does)",
        find=find.floored_batch,
    ),
    Rule(
        id="GS205",
        level="warning",
        says="a DistributedSampler in the data's own order repeats samples to make shares equal",
        why="of 10 samples 4 ranks evaluate 12: a metric counts two of them twice",
        fix="each rank takes range(rank, len(dataset), world_size), and ranks sum counts",
        find=find.padded_evaluation,
    ),
    Rule(
        id="GS301",
        level="error",
        says="the device is chosen by the global rank",
        why="on the second host rank 8 has no cuda:8",
        fix="use the local rank: LOCAL_RANK under torchrun, world.local_rank of gs.init()",
        find=find.device_of_global_rank,
    ),
    Rule(
        id="GS302",
        level="error",
        says="the model moves after DDP has wrapped it",
        why="DDP's buckets and hooks belong to the parameters where they were",
        fix="move it first, wrap it then",
        find=find.moved_after_wrapping,
    ),
    Rule(
        id="GS303",
        level="warning",
        says="torch.load without map_location",
        why="tensors come back to the GPU that saved them: all ranks fill the first one",
        fix='map_location="cpu", or the rank\'s own device',
        find=find.loaded_to_one_device,
    ),
    Rule(
        id="GS401",
        level="error",
        says="a collective that only some ranks call",
        why="the others never come: it hangs until the timeout",
        fix="call it on every rank, outside of the condition",
        find=find.collective_on_one_rank,
    ),
    Rule(
        id="GS402",
        level="error",
        says="one rank alone runs the model through its DDP wrapper",
        why="the wrapper's forward broadcasts buffers, which takes all ranks: it hangs, or meets "
        "another collective",
        fix="evaluate model.module, or let all ranks take part",
        find=find.wrapper_on_one_rank,
    ),
    Rule(
        id="GS403",
        level="warning",
        says="every rank writes the same file",
        why="they write over each other: the file may end up torn",
        fix="if rank == 0: save, then dist.barrier() on all ranks",
        find=find.saved_by_all,
    ),
    Rule(
        id="GS404",
        level="warning",
        says="the wrapper's state_dict is saved",
        why='its keys begin with "module.", which the plain model does not load',
        fix="model.module.state_dict()",
        find=find.wrapper_saved,
    ),
    Rule(
        id="GS405",
        level="error",
        says="weights are loaded on one rank after wrapping",
        why="DDP sends rank 0's weights round when it wraps, not later: replicas differ from here",
        fix="load on every rank, or before wrapping",
        find=find.loaded_on_one_rank,
    ),
    Rule(
        id="GS501",
        level="warning",
        says="a mean over ranks of each rank's mean",
        why="it is the mean over samples only where all ranks have equally many",
        fix="sum losses and counts over ranks, and divide once (sync.mean_loss)",
        find=find.mean_of_means,
    ),
    Rule(
        id="GS502",
        level="note",
        says="the loss that is logged is one rank's own",
        why="it is the mean of that rank's share, not of the global batch",
        fix="all_reduce sum and count first (sync.step returns the global mean)",
        find=find.own_loss_logged,
    ),
    Rule(
        id="GS503",
        level="note",
        says="all ranks draw the same dropout masks",
        why="the same seed everywhere: right for the weights, not for noise",
        fix="after the model is made: torch.manual_seed(seed + rank)",
        find=find.same_noise,
    ),
    Rule(
        id="GS601",
        level="warning",
        says="nn.DataParallel",
        why="one process copies the model to all GPUs in every step; torch advises against it",
        fix="one process per GPU: gs.replicate, or DistributedDataParallel under torchrun",
        find=find.data_parallel,
    ),
    Rule(
        id="GS602",
        level="error",
        says="convert_sync_batchnorm after wrapping",
        why="the new layers are unknown to DDP",
        fix="convert first, wrap then",
        find=find.batch_norm_converted_late,
    ),
    Rule(
        id="GS603",
        level="note",
        says="BatchNorm takes each rank's own statistics",
        why="results depend on how the batch is divided",
        fix="SyncBatchNorm.convert_sync_batchnorm(model), then wrap, or batch_norm='sync'",
        find=find.own_batch_norm,
    ),
)
