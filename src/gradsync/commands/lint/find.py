"""How each mistake of rules.py is found: one function each, which yields the places.

They rather miss a mistake than report a correct program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradsync.commands.lint.script import Script, dotted, is_true, keyword, last

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")
_COLLECTIVES += ("reduce_scatter", "reduce_scatter_tensor", "barrier", "broadcast", "reduce")
_COLLECTIVES += ("broadcast_object_list", "gather", "gather_object", "scatter", "all_to_all")
_COLLECTIVES += ("all_to_all_single", "monitored_barrier", "new_group", "wait_for_everyone")
_BATCH_NORM = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


# -- gradients ------------------------------------------------------------------------------------


def forward_outside_no_sync(s: Script) -> Iterator[ast.AST]:
    """Backwards in a `no_sync` that the forward is not in."""
    for block in s.nodes:
        if not isinstance(block, ast.With):
            continue
        named = [
            last(i.context_expr.func) for i in block.items if isinstance(i.context_expr, ast.Call)
        ]
        if "no_sync" not in named:
            continue
        inside = [node for each in block.body for node in ast.walk(each)]
        backward = [n for n in inside if _is_backward(n)]
        models = {
            dotted(i.context_expr.func.value)
            for i in block.items
            if isinstance(i.context_expr, ast.Call)
            and isinstance(i.context_expr.func, ast.Attribute)
        }
        forward = any(isinstance(n, ast.Call) and dotted(n.func) in models for n in inside)
        # A user's function (`loss = step(batch)`) may contain the forward.
        others = any(isinstance(n, ast.Call) and n not in backward for n in inside)
        if backward and not forward and not others:
            yield backward[0]


def never_synchronised(s: Script) -> Iterator[ast.AST]:
    """The first backward of a script that steps, if all are in a `no_sync` and nothing else reduces
    gradients."""
    backward = [node for node in s.nodes if _is_backward(node)]
    steps = s.wrapped and any(s.calls("step")) and not any(s.calls("all_reduce"))
    if steps and all(any(map(_is_no_sync, s.parents(node))) for node in backward):
        yield from backward[:1]


def _is_no_sync(node: ast.AST) -> bool:
    """Whether it is an unconditional `with model.no_sync():`."""
    calls = [i.context_expr for i in node.items] if isinstance(node, ast.With) else []
    return any(isinstance(each, ast.Call) and last(each.func) == "no_sync" for each in calls)


def flag_after_forward(s: Script) -> Iterator[ast.AST]:
    """Settings of DDP's flag between a forward and its backward."""
    for node in s.nodes:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if last(target) != "require_backward_grad_sync" or not isinstance(target, ast.Attribute):
            continue
        model = dotted(target.value)
        for block, place in s.blocks(node):
            before = any(_calls(each, model) for each in block[:place])
            after = [n for each in block[place + 1 :] for n in ast.walk(each)]
            backward = any(_is_backward(n) for n in after)
            if before and backward and not any(_calls(each, model) for each in block[place + 1 :]):
                yield node
            break


def _is_backward(node: ast.AST) -> bool:
    """Whether it is `loss.backward()`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    )


def _calls(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(n, ast.Call) and dotted(n.func) == name for n in ast.walk(statement))


def _accumulations(s: Script) -> Iterator[tuple[ast.For, ast.If, str]]:
    """Loops whose optimizer steps every K-th time: the loop, the condition, and K as text."""
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
            if every and loop is not None and _has_backward(loop):
                yield loop, above, ast.unparse(every[0])
                break


def _has_backward(loop: ast.For) -> bool:
    return any(_is_backward(n) for n in ast.walk(loop))


def not_divided(s: Script) -> Iterator[ast.AST]:
    """Backwards of accumulated losses that are never divided."""
    for loop, _, every in _accumulations(s):
        parts = [
            ast.unparse(n.right if isinstance(n, ast.BinOp) else n.value)
            for n in ast.walk(loop)
            if isinstance(n, ast.BinOp | ast.AugAssign) and isinstance(n.op, ast.Div | ast.Mult)
        ]
        summed = any(isinstance(n, ast.Constant) and n.value == "sum" for n in ast.walk(s.tree))
        if not any(every in part or part in every for part in parts) and not summed:
            yield next(n for n in ast.walk(loop) if _is_backward(n))
    for loop in s.nodes:  # over the leaves of a step of gs.loader
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Name):
            continue
        steps = [each for each in s.parents(loop) if isinstance(each, ast.For)]
        steps = [each for each in steps if dotted(each.target) == loop.iter.id]
        made = [v for each in steps for v in [each.iter, *s.values(dotted(each.iter))]]
        dealt = any(isinstance(v, ast.Call) and keyword(v, "global_batch_size") for v in made)
        nodes = list(ast.walk(loop))
        divided = any(isinstance(getattr(n, "op", None), ast.Div | ast.Mult) for n in nodes)
        stepped = any(isinstance(n, ast.Call) and last(n.func) == "step" for n in nodes)
        if dealt and not divided and not stepped:
            yield from [n for n in nodes if _is_backward(n) and not _is_of_handle(n)][:1]


def _is_of_handle(node: ast.AST) -> bool:
    """Whether it is `sync.backward(loss, micro_batch)`."""
    if not isinstance(node, ast.Call):
        return False
    return len(node.args) == 2 or bool(keyword(node, "micro_batch") or keyword(node, "weight"))


def changed_sums(s: Script) -> Iterator[ast.AST]:
    """Gradients clipped between `sync.backward` and `sync.step`."""
    for clip in s.calls("clip_grad_norm_", "clip_grad_value_"):
        handles = {
            dotted(call.func).removesuffix(".backward")
            for call in s.calls("backward")
            if _is_of_handle(call) and call.lineno < clip.lineno
        }
        steps = (call for call in s.calls("step") if call.lineno > clip.lineno)
        near = (each for each in steps if s.function_of(each) is s.function_of(clip))
        if any(dotted(each.func).removesuffix(".step") in handles for each in near):
            yield clip


def fires_at_once(s: Script) -> Iterator[ast.AST]:
    """Conditions of an accumulation that hold for its first micro-batch."""
    for loop, chosen, _ in _accumulations(s):
        test = chosen.test
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)):
            continue
        left, right = test.left, test.comparators[0]
        if not (isinstance(right, ast.Constant) and right.value == 0):
            continue
        if not (isinstance(left, ast.BinOp) and isinstance(left.left, ast.Name)):
            continue
        counts = loop.iter
        if not isinstance(counts, ast.Call):
            continue
        target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
        plain = last(counts.func) == "enumerate" and len(counts.args) == 1 and not counts.keywords
        plain |= last(counts.func) == "range" and len(counts.args) == 1
        if plain and dotted(target) == left.left.id:
            yield chosen


def syncs_every_leaf(s: Script) -> Iterator[ast.AST]:
    """Accumulating loops under DDP without `no_sync`."""
    if s.wrapped and "no_sync" not in s.text and "require_backward_grad_sync" not in s.text:
        for loop, _, _ in _accumulations(s):
            yield loop


# -- data -----------------------------------------------------------------------------------------


def no_set_epoch(s: Script) -> Iterator[ast.AST]:
    """Shuffling samplers in a script that never calls `set_epoch`."""
    if not any(s.calls("set_epoch")):
        for call in s.calls("DistributedSampler"):
            shuffle = keyword(call, "shuffle")
            if not (isinstance(shuffle, ast.Constant) and shuffle.value is False):
                yield call


def _loaders(s: Script) -> Iterator[tuple[ast.Call, bool]]:
    """DataLoaders, and whether each has a sampler."""
    for call in s.calls("DataLoader"):
        given = keyword(call, "sampler") or keyword(call, "batch_sampler")
        yield call, given is not None or any(each.arg is None for each in call.keywords)


def whole_data_on_each_rank(s: Script) -> Iterator[ast.AST]:
    """Shuffled loaders without a sampler in a script that uses DDP."""
    divided = "split_dataset_by_node" in s.text or bool(list(s.calls("prepare")))
    if not s.wrapped or divided:
        return
    for call, has_sampler in _loaders(s):
        if not has_sampler and is_true(keyword(call, "shuffle")):
            yield call


def floored_batch(s: Script) -> Iterator[ast.AST]:
    """Divisions by the number of ranks whose remainder the script never checks."""
    for node in s.nodes:
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.FloorDiv)
            and (s.is_world_size(node.right) or _is_of_batch(s, node))
            and not _is_checked(s, node.right)
        ):
            yield node


def _is_of_batch(s: Script, node: ast.BinOp) -> bool:
    """Whether it divides a batch by a product that includes the number of ranks; the number of
    steps in `len(dataset)` does not count."""
    sized = any(word in ast.unparse(node.left).lower() for word in ("batch", "tokens_per"))
    product = isinstance(node.right, ast.BinOp) and isinstance(node.right.op, ast.Mult)
    ranks = (s.is_world_size(n) or dotted(n) == "world_size" for n in ast.walk(node.right))
    return sized and product and any(ranks)  # or a function's argument with that name


def padded_evaluation(s: Script) -> Iterator[ast.AST]:
    """Samplers in the data's own order that repeat samples if shares are unequal."""
    for call in s.calls("DistributedSampler"):
        shuffle, whole = keyword(call, "shuffle"), is_true(keyword(call, "drop_last"))
        ordered = isinstance(shuffle, ast.Constant) and shuffle.value is False
        if ordered and not whole and "gather_for_metrics" not in s.text:
            yield call


def _is_checked(s: Script, divisor: ast.expr) -> bool:
    """Whether the script checks the remainder anywhere."""
    size = ast.unparse(divisor)
    return any(
        isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Mod)
        and ast.unparse(each.right) == size
        for each in s.nodes
    )


# -- devices --------------------------------------------------------------------------------------


def device_of_global_rank(s: Script) -> Iterator[ast.AST]:
    """Devices numbered by the global rank."""
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


def moved_after_wrapping(s: Script) -> Iterator[ast.AST]:
    """Moves of a DDP model."""
    for call in s.calls("to", "cuda"):
        on = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if on in s.wrapped and call.lineno > s.wrapped[on]:
            yield call


def loaded_to_one_device(s: Script) -> Iterator[ast.AST]:
    """`torch.load` without a device."""
    if not s.is_distributed or "cuda" not in s.text:
        return
    for call in s.calls("load"):
        given = len(call.args) > 1 or keyword(call, "map_location") is not None
        if dotted(call.func) == "torch.load" and not given:
            yield call


# -- rank 0 ---------------------------------------------------------------------------------------


def collective_on_one_rank(s: Script) -> Iterator[ast.AST]:
    """Collectives under a condition on the rank."""
    for call in s.calls(*_COLLECTIVES):
        owner = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        theirs = owner in ("dist", "torch.distributed", "distributed", "accelerator", "fabric")
        if (theirs or owner in ("gs", "gradsync")) and s.on_some_ranks(call):
            yield call


def wrapper_on_one_rank(s: Script) -> Iterator[ast.AST]:
    """Calls of a DDP model, or of an evaluation with one, on one rank alone."""
    for node in s.nodes:
        if not isinstance(node, ast.Call) or not s.on_one_rank(node) or s.all_come(node):
            continue
        named = dotted(node.func)
        given = [dotted(each) for each in node.args]
        runs = any(
            word in last(node.func).lower() for word in ("eval", "valid", "test", "generate")
        )
        if named in s.wrapped or (runs and any(each in s.wrapped for each in given)):
            yield node


def saved_by_all(s: Script) -> Iterator[ast.AST]:
    """Files that every rank writes under one name; not memory."""
    if not s.is_distributed:
        return
    for call in s.calls("save", "save_pretrained", "save_file"):
        name = dotted(call.func)
        if last(call.func) == "save" and name != "torch.save":
            continue
        guarded = s.on_one_rank(call) or keyword(call, "is_main_process") is not None
        where = call.args[0 if last(call.func) == "save_pretrained" else 1 :]
        named = [each for arg in where for each in (arg, *s.values(dotted(arg)))]
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


def wrapper_saved(s: Script) -> Iterator[ast.AST]:
    """Saved `state_dict`s of a DDP model."""
    for call in s.calls("save"):
        if dotted(call.func) != "torch.save":
            continue
        for node in ast.walk(call):
            if (
                isinstance(node, ast.Call)
                and last(node.func) == "state_dict"
                and isinstance(node.func, ast.Attribute)
                and dotted(node.func.value) in s.wrapped
            ):
                yield node


def loaded_on_one_rank(s: Script) -> Iterator[ast.AST]:
    """Weights loaded into a DDP model on one rank alone."""
    for call in s.calls("load_state_dict"):
        on = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        base = on.removesuffix(".module")
        if base in s.wrapped and call.lineno > s.wrapped[base] and s.on_one_rank(call):
            yield call


# -- numbers --------------------------------------------------------------------------------------


def mean_of_means(s: Script) -> Iterator[ast.AST]:
    """All-reduces of a mean that is then divided by the number of ranks."""
    for call in s.calls("all_reduce"):
        name = dotted(call.args[0]) if call.args else ""
        if not any(word in name.lower() for word in ("loss", "acc", "metric")):
            continue
        values = s.values(name)
        if values and not any(
            (
                isinstance(n, ast.Call)
                and last(n.func) in ("mean", "criterion", "cross_entropy", "mse_loss")
            )
            or (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div))
            for value in values
            for n in ast.walk(value)
        ):
            continue
        average = any(last(n) == "AVG" for n in ast.walk(call))
        divided = any(
            isinstance(n, ast.BinOp | ast.AugAssign)
            and isinstance(n.op, ast.Div)
            and s.is_world_size(n.right if isinstance(n, ast.BinOp) else n.value)
            for n in s.nodes
        )
        if values and (average or divided):
            yield call


def own_loss_logged(s: Script) -> Iterator[ast.AST]:
    """Logged losses of one rank in a script that reduces none."""
    if not s.wrapped or any(s.calls("all_reduce", "reduce", "all_gather", "gather_for_metrics")):
        return
    for call in s.calls("print", "log", "add_scalar", "info", "set_postfix"):
        for node in ast.walk(call):
            if (
                isinstance(node, ast.Call)
                and last(node.func) == "item"
                and isinstance(node.func, ast.Attribute)
                and "loss" in dotted(node.func.value).lower()
                and s.on_one_rank(call)
            ):
                yield call


def same_noise(s: Script) -> Iterator[ast.AST]:
    """The first seed, if all ranks draw dropout from it."""
    seeds = list(s.calls("manual_seed", "seed_everything", "manual_seed_all"))
    if not s.wrapped or not seeds or not any(s.calls("Dropout", "dropout")):
        return
    names = s.ranks | s.local_ranks | {"rank", "local_rank"}
    for call in seeds:
        if any(dotted(n) in names or s.is_rank(n) for arg in call.args for n in ast.walk(arg)):
            return
    yield seeds[0]


# -- model ----------------------------------------------------------------------------------------


def data_parallel(s: Script) -> Iterator[ast.AST]:
    """Uses of `nn.DataParallel`."""
    for call in s.calls("DataParallel"):
        if dotted(call.func) in ("nn.DataParallel", "torch.nn.DataParallel", "DataParallel"):
            yield call


def batch_norm_converted_late(s: Script) -> Iterator[ast.AST]:
    """Conversions to SyncBatchNorm of a DDP model."""
    for call in s.calls("convert_sync_batchnorm"):
        name = dotted(call.args[0]) if call.args else ""
        if name in s.wrapped and call.lineno > s.wrapped[name]:
            yield call


def own_batch_norm(s: Script) -> Iterator[ast.AST]:
    """The first BatchNorm of a DDP model that is not converted."""
    if s.wrapped and not any(s.calls("convert_sync_batchnorm", "SyncBatchNorm")):
        yield from list(s.calls(*_BATCH_NORM))[:1]
