"""Every private name of torch that gradsync uses: here and nowhere else (tools/check_safety.py).

It also has public names that torch changed between the releases we support (2.11 to 2.15).
tests/unit/core/test_torch_private.py has a canary for each.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    _use_grad_for_differentiable,
)

NEWEST_TESTED = (2, 15)
"""Release of torch."""

# -- tensors --------------------------------------------------------------------------------------

# One call for many tensors, as torch's own optimizers do it.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub
foreach_zero_ = torch._foreach_zero_

version: Callable[[Tensor], int] = attrgetter("_version")
"""Autograd's count of in-place writes to a tensor."""

storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""Number of tensors, arrays and `UntypedStorage` objects that share a storage, by its address."""

storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

uses: Callable[[Tensor], int] = methodcaller("_use_count")
"""1, and one more for each graph that keeps the tensor for its backward, and each view of it."""

in_transform = torch._C._functorch.maybe_current_level
"""Level of the running `torch.func` transform (`grad`, `vmap` …); None without one."""


viewed: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The base tensor of a view; None if it is not a view."""

PROFILE_ALL_THREADS: Callable[[], Any] = partial(
    torch._C._profiler._ExperimentalConfig, profile_all_threads=True
)
"""A configuration that makes torch's profiler record other threads than the one that starts it."""

# -- autograd -------------------------------------------------------------------------------------

current_graph_task = torch._C._current_graph_task_id
"""Number of the running backward, -1 without one; nested ones have higher numbers."""

at_the_end_of_backward = Variable._execution_engine.queue_callback  # pyrefly: ignore
"""Call a function once the running backward has finished; only valid in a hook."""


def saved(node: Any, name: str) -> Any:
    """The value a node of the autograd graph keeps as `name` for its backward; None without it."""
    return getattr(node, f"_saved_{name}", None)


# -- modules and optimizers -----------------------------------------------------------------------

BatchNorm = _BatchNorm
"""Base class of torch's BatchNorm layers of all dimensions."""

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names by which DDP, `torch.compile`, FSDP1 and activation checkpointing keep their module."""

input_check: Callable[[BatchNorm], Callable[[Tensor], None]] = attrgetter("_check_input_dim")
"""A layer's check of its input: raises if that has the wrong number of dimensions."""


def move_own(module: nn.Module, device: torch.device | str) -> None:
    """Move the tensors of `module` itself, not those of its submodules."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)


step_hooks: Callable[[torch.optim.Optimizer], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)
"""Hooks that are called before and after the step of this optimizer, by number."""

optimizer_pre_hooks: dict[int, Callable[..., Any]] = _global_optimizer_pre_hooks
"""Hooks that are called before any optimizer's step, by number."""

optimizer_post_hooks: dict[int, Callable[..., Any]] = _global_optimizer_post_hooks
"""Hooks that are called after any optimizer's step, by number."""


def end_workers(batches: object) -> None:
    """End the worker processes of a `DataLoader`'s iterator, if any. After an error the traceback's
    reference would keep them alive."""
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


# -- torch's DDP ----------------------------------------------------------------------------------


def regroup_ddp_buckets(ddp: DistributedDataParallel) -> None:
    """Regroup buckets as DDP's forward does after the first synchronised backward."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNCS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers"
DDP_WITHOUT_BUFFER_SYNC: dict[str, Any] = {_SYNCS: False}
"""The argument of DDP that leaves buffers alone in the forward: renamed in torch 2.13."""

active_ddp: Callable[[], DistributedDataParallel | None] = partial(
    getattr, DistributedDataParallel, "_active_ddp_module"
)
"""The DDP whose forward is running."""


# -- FSDP2 ----------------------------------------------------------------------------------------


def reduce_unused_params(unit: Any) -> None:
    """Make a module sharded by `fully_shard` send zeros for parameters that its forward used and
    that got no gradient: torch 2.13 has a switch for it."""
    if (switch := getattr(unit, "set_reduce_scatter_unused_params", None)) is not None:
        return switch(True, recurse=False)
    if (params := unit._get_fsdp_state()._fsdp_param_group) is None:
        return None
    reduce = params.post_backward

    def post_backward(*given: Any) -> None:
        for each in params.fsdp_params if params.reduce_grads else ():
            whole: Any = getattr(each, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is each.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        reduce(*given)

    params.post_backward = post_backward
    return None


# -- process groups -------------------------------------------------------------------------------


def device_types(group: Any) -> list[str]:
    """Kinds of devices whose tensors `group` takes."""
    return [device.type for device in group._device_types]


def backend_of(group: Any, device: torch.device | str) -> Any:
    """The backend (gloo, NCCL …) that moves tensors of `device`."""
    return group._get_backend(torch.device(device))


def timeout_of(group: Any, device: torch.device | str = "cpu") -> timedelta:
    """Timeout of a collective of `device`; `group` may also be a backend."""
    backend = group if hasattr(group, "options") else backend_of(group, device)
    return backend.options._timeout


def set_timeout(group: Any, device: torch.device | str, timeout: timedelta) -> None:
    """Set the timeout of collectives of `device` that begin from now on."""
    backend_of(group, device)._set_default_timeout(timeout)


def high_priority(timeout: timedelta) -> Any:
    """Options of an NCCL group whose kernels run before those of layers."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


all_gather_flat: Callable[[Any], Callable[..., Any]] = attrgetter("_allgather_base")
"""A group's `all_gather` into one tensor: `all_gather_single` since torch 2.13."""

reduce_scatter_flat: Callable[[Any], Callable[..., Any]] = attrgetter("_reduce_scatter_base")
"""A group's `reduce_scatter` from one tensor: `reduce_scatter_single` since torch 2.13."""

num_issued = methodcaller("_get_sequence_number_for_group")
"""Number of operations that this process has issued to a group."""

abort_process_groups = dist.distributed_c10d._abort_process_group
"""Abort NCCL's groups with pending operations: destroying them waits for those, maybe forever."""


NCCL_ENDS_BY = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
"""Variables by which NCCL's watchdog, or its monitor, ends a process that has lost a peer."""


def abort_nccl() -> None:
    """End what NCCL's groups have under way: tensors keep garbage, and whatever waits for them goes
    on. All groups at once: an abort may wait for another group's kernels (pytorch #119797)."""
    groups = [group for group in process_groups() if "cuda" in device_types(group)]
    threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
    for each in threads:
        each.start()
    for each in threads:
        each.join(5.0)


def number_groups_anew() -> None:
    """Name the next process group as the first one; one that could not be made took a number."""
    dist.distributed_c10d._world.group_count = 0


def flight_record() -> str:
    """Entries of torch's flight recorder on this process's collectives, as JSON; "" if it is empty
    or off (TORCH_FR_BUFFER_SIZE)."""
    dump: Callable[[], bytes] = attrgetter("_dump_fr_trace_json")(torch._C._distributed_c10d)
    record = dump().decode(errors="replace")
    return record if '"entries"' in record else ""


def process_groups() -> list[Any]:
    """All process groups that this process is in."""
    return list(dist.distributed_c10d._world.pg_map)


def coalesced(group: Any, device: torch.device, post: Callable[[], object]) -> Any:
    """Coalesce the operations that `post` issues; only for backends that support it."""
    group._start_coalescing(device)
    post()
    return group._end_coalescing(device)


def mesh_of(group: Any, device: torch.device, owner: object) -> DeviceMesh:
    """The ranks of `group` as a one-dimensional mesh, while `owner` lives: torch's caches keep
    meshes forever, and with them the group and its sockets."""
    mesh = DeviceMesh.from_group(group, device.type)
    weakref.finalize(owner, getattr(mesh, "_pg_registry", {}).clear)
    return mesh


# -- pipelines ------------------------------------------------------------------------------------


def renew_received(info: Any, device: torch.device) -> None:
    """Give a pipeline stage a fresh receive buffer; the model's own inputs have none. Torch 2.11
    sets a buffer's shape by the first one only, and 2.15 allocates a fresh one."""
    if hasattr(info, "allocate_buffer"):
        return
    if not getattr(info, "is_root_arg", not hasattr(info, "source")):
        if not hasattr(info, "tensor_meta"):
            info.tensor_meta = torch.empty_like(info.buffer, device="meta")
            info.needs_grad = info.buffer.requires_grad
        meta, needs_grad = info.tensor_meta, getattr(info, "needs_grad", False)
        info.buffer = torch.empty(
            meta.shape, dtype=meta.dtype, device=device, requires_grad=needs_grad
        )


def drop_received(info: Any) -> None:
    """Release a receive buffer; torch 2.11 needs a tensor in its place."""
    info.buffer = None if hasattr(info, "is_root_arg") else torch.empty(0)


# -- the elastic agent ----------------------------------------------------------------------------


def rank_processes(agent: Any) -> list[Any]:
    """The `SubprocessHandler` of each local rank, in order."""
    context = agent._pcontext
    return [each for _, each in sorted(context.subprocess_handlers.items())] if context else []


def start_again(agent: Any, number: int, variables: dict[str, str]) -> None:
    """Start the process of a local rank again, in the environment `variables` and its own."""
    handler, context = agent._pcontext.subprocess_handlers[number], agent._pcontext
    handler.proc = handler._popen(handler.proc.args, variables | context.envs[number])
    agent._worker_group.workers[number].id = handler.proc.pid


log_files: Callable[[Any], tuple[Any, Any]] = attrgetter("_stdout", "_stderr")
"""A rank's log files, or None; torch does not close those of successful ranks."""

kill_ranks = methodcaller("_shutdown", signal.SIGKILL)
"""End all local ranks of an agent at once."""


def forbid_restarts(agent: Any) -> None:
    """Make the agent restart no rank from now on."""
    agent._remaining_restarts = 0


# -- the compiler ---------------------------------------------------------------------------------


def _skip(method: Any) -> bool:
    """Mark `method` if this torch has marks; returns whether it did."""
    if not run_uncompiled(method):
        return False
    method._torchdynamo_disable = True  # a graph that calls it ends there
    return True


def run_uncompiled(function: Any) -> bool:
    """Make the compiler skip `function` and its callees, unless a graph already calls it; returns
    whether this torch supports that."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(frames, "_FrameAction", None)
    if action is not None:
        both = frames._FrameExecStrategy(action.SKIP, action.SKIP)
        frames.set_code_exec_strategy(function.__code__, both)
    return action is not None


def run_when_traced(function: Any) -> None:
    """Make the compiler call `function` once, while tracing; the graph does not call it."""
    function._dynamo_marked_constant = True


_COMPILER = "torch._dynamo"
_DISABLED = "__dynamo_disable"


FRAMES = f"{_COMPILER}.convert_frame"
"""The module whose FRAME_COUNTER counts compiled frames, once it is loaded."""

_NAMES_OF_STEP = {
    *(_COMPILER, "_dynamo", "graph_break", "is_grad_enabled", "set_grad_enabled", "defaults"),
    *("cast", "Optimizer"),
}


def leave_compiler_unloaded() -> None:
    """Make torch's optimizers work without the compiler until something else imports it.

    Torch wraps their methods to keep them out of compiled graphs, and for that imports the compiler
    for the first optimizer: a second and 800 modules in every process. Before the import there are
    no graphs. Does nothing if this torch wraps them in another way.
    """
    if _COMPILER in sys.modules:
        return
    disabled, with_grad = torch._disable_dynamo(_skip), _use_grad_for_differentiable(_skip)
    if _DISABLED in disabled.__code__.co_consts:
        for method in vars(torch.optim.Optimizer).values():
            if getattr(method, "__code__", None) is disabled.__code__:
                _call_directly(method)
    if set(with_grad.__code__.co_names) == _NAMES_OF_STEP:
        for cls in vars(torch.optim).values():
            step = vars(cls).get("step") if isinstance(cls, type) else None
            if getattr(step, "__code__", None) is with_grad.__code__:
                cls.step = _plain_step(step)


def _call_directly(method: Any) -> None:
    """Put our function where torch's wrapper `method` caches the one made by the compiler."""
    function = method.__wrapped__

    def direct(*given: Any, **named: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*given, **named)
        vars(function).pop(_DISABLED, None)
        return method(*given, **named)

    if _skip(direct):
        setattr(function, _DISABLED, direct)


def _plain_step(step: Any) -> Any:
    """`step` without the compiler's `graph_break`, which its wrapper calls."""
    function = step.__wrapped__

    @wraps(step)
    def plain(self: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or _COMPILER in sys.modules:
            return step(self, *given, **named)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return function(self, *given, **named)

    return plain
