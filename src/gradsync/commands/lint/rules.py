"""Known mistakes in data-parallel training scripts: what, why, the cure, and how it is found.

A rule yields the places. It rather misses a mistake than reports a correct program.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from gradsync.commands.lint.script import (
    Script,
    calls_in,
    dotted,
    is_constant,
    keyword,
    last,
    owner,
)

Level = Literal["error", "warning"]
"""Wrong results or a hang; wrong or slow in common cases."""

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")
_COLLECTIVES += ("reduce_scatter", "reduce_scatter_tensor", "barrier", "broadcast", "reduce")
_COLLECTIVES += ("broadcast_object_list", "gather", "gather_object", "scatter", "all_to_all")
_COLLECTIVES += ("all_to_all_single", "monitored_barrier", "new_group", "wait_for_everyone")
_MEANS = ("mean", "criterion", "cross_entropy", "mse_loss")
_LIBRARIES = ("dist", "torch.distributed", "distributed", "accelerator", "fabric", "gs", "gradsync")
_IGNORED = re.compile(r"#\s*gradsync:\s*ignore(?:\[([\w, ]+)\])?")


@dataclass(frozen=True, slots=True)
class Rule:
    """A mistake."""

    id: str
    level: Level
    says: str
    why: str
    fix: str
    find: Callable[[Script], Iterator[ast.AST]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A mistake and its place."""

    rule: Rule
    path: str
    line: int


def lint(script: Script) -> list[Found]:
    """All mistakes, in line order."""
    found = []
    for rule in RULES:
        for node in rule.find(script):
            line: int = getattr(node, "lineno", 1)
            said = _IGNORED.search(script.lines[line - 1])
            if said is None or (said[1] and rule.id not in said[1].replace(",", " ").split()):
                found.append(Found(rule=rule, path=script.path, line=line))
    return sorted(set(found), key=lambda each: (each.line, each.rule.id))


def _rule(
    number: str, level: Level, says: str, *, why: str, fix: str
) -> Callable[[Callable[[Script], Iterator[ast.AST]]], Rule]:
    return lambda find: Rule(number, level, says, why, fix, find)


# -- gradients ------------------------------------------------------------------------------------


@_rule(
    "GS101",
    "error",
    "backward inside no_sync(), the forward outside",
    why="DDP decides in the forward whether this backward synchronises: this one does, and the "
    "gradients of the micro-batches before are averaged twice or not at all",
    fix="put the forward into the same `with model.no_sync():`",
)
def _forward_outside_no_sync(s: Script) -> Iterator[ast.AST]:
    for block in s.nodes:
        if not isinstance(block, ast.With):
            continue
        opened = [item.context_expr for item in block.items]
        if any(isinstance(each, ast.Call) and last(each.func) == "no_sync" for each in opened):
            calls = [call for each in block.body for call in calls_in(each)]
            # Any other call may contain the forward, as the user's own `loss = step(batch)`.
            if calls and all(last(call.func) == "backward" for call in calls):
                yield calls[0]


@_rule(
    "GS102",
    "error",
    "require_backward_grad_sync is set between forward and backward",
    why="DDP reads it in the forward: set after it, it holds for the next micro-batch, and "
    "replicas drift apart",
    fix="set it before the forward, or use `with model.no_sync():` around both",
)
def _flag_after_forward(s: Script) -> Iterator[ast.AST]:
    for node in s.nodes:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if last(target) != "require_backward_grad_sync" or not isinstance(target, ast.Attribute):
            continue
        model = dotted(target.value)
        for block, place in s.blocks(node):
            before = [dotted(c.func) for each in block[:place] for c in calls_in(each)]
            after = [dotted(c.func) for each in block[place + 1 :] for c in calls_in(each)]
            loss = [c for each in block[place + 1 :] for c in calls_in(each, "backward")]
            if model in before and loss and model not in after:
                yield node
            break


def _accumulations(s: Script) -> Iterator[tuple[ast.For, str]]:
    """Loops whose optimizer steps every K-th time: the loop, and K as text."""
    for step in s.calls("step"):
        for above in s.parents(step):
            if not isinstance(above, ast.If):
                continue
            every = [
                n.right
                for n in ast.walk(above.test)
                if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)
            ]
            loop = next((each for each in s.parents(above) if isinstance(each, ast.For)), None)
            if every and loop is not None and any(calls_in(loop, "backward")):
                yield loop, ast.unparse(every[0])
                break


@_rule(
    "GS104",
    "error",
    "gradients add up over micro-batches, and nothing divides the loss by their number",
    why="each backward adds a whole mean: the step is as many times too long",
    fix="(loss / steps).backward(), or for the micro-batches of gs.loader sync.backward(loss, "
    "micro_batch) and sync.step(optimizer), which divide by the targets of all",
)
def _not_divided(s: Script) -> Iterator[ast.AST]:
    for loop, every in _accumulations(s):
        parts = [
            ast.unparse(n.right if isinstance(n, ast.BinOp) else n.value)
            for n in ast.walk(loop)
            if isinstance(n, ast.BinOp | ast.AugAssign) and isinstance(n.op, ast.Div | ast.Mult)
        ]
        summed = any(isinstance(n, ast.Constant) and n.value == "sum" for n in ast.walk(s.tree))
        if not any(every in part or part in every for part in parts) and not summed:
            yield next(calls_in(loop, "backward"))


@_rule(
    "GS107",
    "error",
    "gradients are clipped between sync.backward() and sync.step()",
    why="there they are sums of this rank's micro-batches, under most strategies not even in "
    ".grad: clipping does nothing, or something else on each number of ranks",
    fix="sync.step(optimizer, clip_norm=1.0), which clips the mean over all ranks",
)
def _changed_sums(s: Script) -> Iterator[ast.AST]:
    for clip in s.calls("clip_grad_norm_", "clip_grad_value_"):
        handles = {  # of `sync.backward(loss, micro_batch)`
            owner(call)
            for call in s.calls("backward")
            if call.lineno < clip.lineno
            and (len(call.args) == 2 or keyword(call, "micro_batch") or keyword(call, "weight"))
        }
        steps = (call for call in s.calls("step") if call.lineno > clip.lineno)
        near = (each for each in steps if s.function_of(each) is s.function_of(clip))
        if any(owner(each) in handles for each in near):
            yield clip


@_rule(
    "GS103",
    "warning",
    "gradients are synchronised in every micro-batch",
    why="under accumulation only the last one needs it: the others send all gradients for nothing",
    fix="all but the last under `with model.no_sync():`, forward included",
)
def _syncs_every_micro_batch(s: Script) -> Iterator[ast.AST]:
    if s.wrapped and "no_sync" not in s.text and "require_backward_grad_sync" not in s.text:
        yield from (loop for loop, _ in _accumulations(s))


# -- data -----------------------------------------------------------------------------------------


@_rule(
    "GS201",
    "error",
    "DistributedSampler without set_epoch",
    why="it shuffles by seed + epoch: without it every epoch has the same order",
    fix="sampler.set_epoch(epoch) at the beginning of each epoch",
)
def _no_set_epoch(s: Script) -> Iterator[ast.AST]:
    if not any(s.calls("set_epoch")):
        for call in s.calls("DistributedSampler"):
            if not is_constant(keyword(call, "shuffle"), value=False):
                yield call


@_rule(
    "GS203",
    "warning",
    "a shuffled DataLoader without a sampler for the rank",
    why="each rank goes through all of the data: an epoch is as many epochs as there are ranks",
    fix="sampler=DistributedSampler(dataset), or gs.loader(dataset, world, …)",
)
def _whole_data_on_each_rank(s: Script) -> Iterator[ast.AST]:
    divided = "split_dataset_by_node" in s.text or bool(list(s.calls("prepare")))
    if not s.wrapped or divided:
        return
    for call in s.calls("DataLoader"):
        given = {each.arg for each in call.keywords} & {"sampler", "batch_sampler", None}
        if not given and is_constant(keyword(call, "shuffle"), value=True):
            yield call


@_rule(
    "GS204",
    "warning",
    "a batch is divided by the number of ranks and rounded down",
    why="10 // 4 is 2: the global batch shrinks without a word, and depends on the ranks",
    fix="refuse a remainder, or let shares differ and weigh them (gs.loader does)",
)
def _floored_batch(s: Script) -> Iterator[ast.AST]:
    operations = [node for node in s.nodes if isinstance(node, ast.BinOp)]
    checked = {ast.unparse(node.right) for node in operations if isinstance(node.op, ast.Mod)}
    for node in operations:
        is_floored = isinstance(node.op, ast.FloorDiv) and ast.unparse(node.right) not in checked
        if is_floored and (s.is_world_size(node.right) or _is_of_batch(s, node)):
            yield node


def _is_of_batch(s: Script, node: ast.BinOp) -> bool:
    """Whether it divides a batch by a product that includes the number of ranks; the number of
    steps in `len(dataset)` does not count."""
    sized = any(word in ast.unparse(node.left).lower() for word in ("batch", "tokens_per"))
    product = isinstance(node.right, ast.BinOp) and isinstance(node.right.op, ast.Mult)
    ranks = (s.is_world_size(n) or dotted(n) == "world_size" for n in ast.walk(node.right))
    return sized and product and any(ranks)  # or a function's argument with that name


@_rule(
    "GS205",
    "warning",
    "a DistributedSampler in the data's own order repeats samples to make shares equal",
    why="of 10 samples 4 ranks evaluate 12: a metric counts two of them twice",
    fix="each rank takes range(rank, len(dataset), world_size), and ranks sum counts",
)
def _padded_evaluation(s: Script) -> Iterator[ast.AST]:
    for call in s.calls("DistributedSampler"):
        ordered = is_constant(keyword(call, "shuffle"), value=False)
        whole = is_constant(keyword(call, "drop_last"), value=True)
        if ordered and not whole and "gather_for_metrics" not in s.text:
            yield call


# -- devices --------------------------------------------------------------------------------------


@_rule(
    "GS301",
    "error",
    "the device is chosen by the global rank",
    why="on the second host rank 8 has no cuda:8",
    fix="use the local rank: LOCAL_RANK under torchrun, world.local_rank of gs.init()",
)
def _device_of_global_rank(s: Script) -> Iterator[ast.AST]:
    for node in s.nodes:
        if isinstance(node, ast.JoinedStr):
            start = node.values[0] if node.values else None
            named = isinstance(start, ast.Constant) and str(start.value).startswith("cuda:")
            inside = [v.value for v in node.values if isinstance(v, ast.FormattedValue)]
            if named and any(map(s.is_rank, inside)):
                yield node
        elif isinstance(node, ast.Call):
            name, args = last(node.func), list(node.args)
            if name == "device" and len(args) == 2:
                args = args[1:]
            elif name in ("DistributedDataParallel", "DDP"):
                ids = keyword(node, "device_ids")
                args = ids.elts if isinstance(ids, ast.List) else []
            elif name not in ("set_device", "cuda", "to"):
                continue
            if any(map(s.is_rank, args)):
                yield node


# -- rank 0 ---------------------------------------------------------------------------------------


@_rule(
    "GS401",
    "error",
    "a collective that only some ranks call",
    why="the others never come: it hangs until the timeout",
    fix="call it on every rank, outside of the condition",
)
def _collective_on_one_rank(s: Script) -> Iterator[ast.AST]:
    for call in s.calls(*_COLLECTIVES):
        if owner(call) in _LIBRARIES and s.on_some_ranks(call):
            yield call


@_rule(
    "GS402",
    "error",
    "one rank alone runs the model through its DDP wrapper",
    why="the wrapper's forward broadcasts buffers, which takes all ranks: it hangs, or meets "
    "another collective",
    fix="evaluate model.module, or let all ranks take part",
)
def _wrapper_on_one_rank(s: Script) -> Iterator[ast.AST]:
    for node in s.nodes:
        if not isinstance(node, ast.Call) or not s.on_one_rank(node):
            continue
        named = dotted(node.func)
        given = [dotted(each) for each in node.args]
        runs = any(
            word in last(node.func).lower() for word in ("eval", "valid", "test", "generate")
        )
        if named in s.wrapped or (runs and any(each in s.wrapped for each in given)):
            yield node


@_rule(
    "GS403",
    "warning",
    "every rank writes the same file",
    why="they write over each other: the file may end up torn",
    fix="if rank == 0: save, then dist.barrier() on all ranks",
)
def _saved_by_all(s: Script) -> Iterator[ast.AST]:
    if not s.is_distributed:
        return
    for call in s.calls("save", "save_pretrained", "save_file"):
        name = dotted(call.func)
        if last(call.func) == "save" and name != "torch.save":
            continue
        guarded = s.on_one_rank(call) or keyword(call, "is_main_process") is not None
        where = call.args[0 if last(call.func) == "save_pretrained" else 1 :]
        named = [each for arg in where for each in (arg, *s.values[dotted(arg)])]
        parts = [n for each in named for n in ast.walk(each)]
        own = any(s.is_rank(n) or last(n) in ("rank", "BytesIO") for n in parts)
        if not guarded and not own and not _called_by_one_rank(s, call):
            yield call


def _called_by_one_rank(s: Script, call: ast.Call) -> bool:
    """Whether the function around a call is itself only called on one rank."""
    function = s.function_of(call)
    if not isinstance(function, ast.FunctionDef):
        return False
    uses = [use for use in s.calls(function.name) if dotted(use.func) == function.name]
    return bool(uses) and all(s.on_one_rank(use) for use in uses)


@_rule(
    "GS501",
    "warning",
    "a mean over ranks of each rank's mean",
    why="it is the mean over samples only where all ranks have equally many",
    fix="sum losses and counts over ranks, and divide once (sync.mean_loss)",
)
def _mean_of_means(s: Script) -> Iterator[ast.AST]:
    for call in s.calls("all_reduce"):
        name = dotted(call.args[0]) if call.args else ""
        if not any(word in name.lower() for word in ("loss", "acc", "metric")):
            continue
        values = s.values.get(name, [])
        means = any(any(calls_in(value, *_MEANS)) for value in values) or any(
            isinstance(getattr(n, "op", None), ast.Div) for v in values for n in ast.walk(v)
        )
        average = any(last(n) == "AVG" for n in ast.walk(call))
        divided = any(
            isinstance(n, ast.BinOp | ast.AugAssign)
            and isinstance(n.op, ast.Div)
            and s.is_world_size(n.right if isinstance(n, ast.BinOp) else n.value)
            for n in s.nodes
        )
        if means and (average or divided):
            yield call


RULES = tuple(
    sorted(
        (each for each in [*globals().values()] if isinstance(each, Rule)), key=lambda rule: rule.id
    )
)
