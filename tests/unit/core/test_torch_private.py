"""A canary for each private name of torch: what breaks when a release renames it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

from gradsync.commands.launch.agent_rendezvous import AgentRendezvous
from gradsync.commands.launch.local import LocalAgent, RankLogs
from gradsync.core import torch_private
from support.fork_server import run_forked
from support.launchers import run_python


def made_with(name: str, cls: type) -> object:
    """An object with the attribute `name` if the constructor of `cls` sets it."""
    return type("Made", (), {name: 1} if f"self.{name}" in inspect.getsource(cls.__init__) else {})


def agent() -> LocalAgent:
    meeting = AgentRendezvous(None)
    spec = WorkerSpec("ranks", 1, meeting, entrypoint="true")
    return LocalAgent(spec, RankLogs(None), meeting)


def loss_node(**how: Any) -> object:
    return F.cross_entropy(
        torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 1]), **how
    ).grad_fn


def step_hooks() -> object:
    return torch.optim.SGD([torch.zeros(1)])


def optimizer_module() -> object:
    return importlib.import_module("torch.optim.optimizer")


def divided() -> object:
    return (torch.zeros(2, requires_grad=True) / 2.0).grad_fn


def meaned() -> object:
    return torch.zeros(2, requires_grad=True).mean().grad_fn


def eval_frame() -> object:
    return torch._C._dynamo.eval_frame


CANARIES: dict[str, tuple[Callable[[], object], str]] = {
    "_foreach_add_": (lambda: torch, "leaves add up along the tree"),
    "_foreach_copy_": (lambda: torch, "gradients enter their buckets"),
    "_foreach_mul_": (lambda: torch, "sums are divided, gradients are clipped"),
    "_foreach_norm": (lambda: torch, "the norm of the gradient, and the search for nan"),
    "_foreach_sub": (lambda: torch, "the outer step of diloco"),
    "_foreach_zero_": (lambda: torch, "a leaf without gradients counts as zeros"),
    "_version": (lambda: torch.Tensor, "weights and buffers written between steps are noticed"),
    "_storage_Use_Count": (lambda: torch._C, "between hosts every step waits for its weights"),
    "_cdata": (lambda: torch.zeros(1).untyped_storage(), "the same"),
    "_use_count": (
        lambda: torch.Tensor,
        "a weight that waits can be swapped for another, and both lost",
    ),
    "_base": (lambda: torch.Tensor, "zero1 takes its own views for a stranger's, and waits"),
    "_profiler": (lambda: torch._C, "`gradsync train --profile`"),
    "_ExperimentalConfig": (lambda: torch._C._profiler, "the same"),
    "_C": (lambda: torch, "the end of a backward, compiled code"),
    "_current_graph_task_id": (lambda: torch._C, "the user's loop tells backwards apart"),
    "_execution_engine": (lambda: torch.autograd.Variable, "the user's loop ends its backward"),
    "_saved_reduction": (loss_node, "a mean that is taken for a sum is said"),
    "_saved_total_weight": (loss_node, "a mean over another number of targets is said"),
    "_saved_other": (divided, "a division that makes a mean is seen"),
    "_saved_self_sym_numel": (meaned, "`.mean()` is seen"),
    "_BatchNorm": (lambda: nn.modules.batchnorm, "BatchNorm layers are found"),
    "_check_input_dim": (lambda: nn.BatchNorm1d, "synchronised BatchNorm refuses what torch does"),
    "_apply": (lambda: nn.Module, "placing frozen parts on devices"),
    "_optimizer_step_pre_hooks": (step_hooks, "hooks on an optimizer see the whole gradient"),
    "_optimizer_step_post_hooks": (step_hooks, "hooks on an optimizer see the whole gradient"),
    "_global_optimizer_pre_hooks": (optimizer_module, "the watch on optimizers"),
    "_global_optimizer_post_hooks": (optimizer_module, "the watch on optimizers"),
    "_use_grad_for_differentiable": (optimizer_module, "optimizers import the compiler"),
    "_disable_dynamo": (lambda: torch, "optimizers import the compiler"),
    "_shutdown_workers": (
        lambda: torch.utils.data.dataloader._MultiProcessingDataLoaderIter,
        "a closed loader leaves worker processes",
    ),
    "_rebuild_buckets": (lambda: dist.Reducer, "DDP is primed, so that a resumed run equals"),
    "_has_rebuilt_buckets": (
        lambda: made_with("_has_rebuilt_buckets", DistributedDataParallel),
        "DDP is primed, so that a resumed run equals",
    ),
    "_active_ddp_module": (lambda: DistributedDataParallel, "a model inside DDP is refused"),
    "_get_fsdp_state": (lambda: FSDPModule, "fsdp on torch 2.11 and 2.12"),
    "_fsdp_param_group": (FSDPState, "the same"),
    "_unsharded_param": (lambda: SimpleNamespace(**FSDPParam.__annotations__), "the same"),
    "_device_types": (lambda: dist.ProcessGroup, "tensors that a group does not take"),
    "_get_backend": (lambda: dist.ProcessGroup, "names and timeouts of backends"),
    "_timeout": (
        lambda: dist.ProcessGroupGloo.Options,
        "groups of ours wait as long as the main one",
    ),
    "_set_default_timeout": (
        lambda: dist.ProcessGroupGloo,
        "NCCL ends a process before we say why",
    ),
    "_get_sequence_number_for_group": (lambda: dist.ProcessGroup, "`bench` counts operations"),
    "_world": (lambda: c10d, "`bench` counts operations"),
    "_abort_process_group": (lambda: c10d, "a failed run on GPUs ends"),
    "_allgather_base": (lambda: dist.ProcessGroup, "every all-gather"),
    "_reduce_scatter_base": (lambda: dist.ProcessGroup, "every reduce-scatter"),
    "_start_coalescing": (lambda: dist.ProcessGroup, "messages through NCCL"),
    "_end_coalescing": (lambda: dist.ProcessGroup, "messages through NCCL"),
    "_pg_registry": (
        lambda: made_with("_pg_registry", DeviceMesh),
        "groups of fsdp and of tensor shards live for ever",
    ),
    "_pcontext": (agent, "`gradsync launch` sees its ranks"),
    "_distributed_c10d": (lambda: torch._C, "no flight record beside the stacks"),
    "_dump_fr_trace_json": (
        lambda: torch._C._distributed_c10d,
        "no flight record beside the stacks of a run that hangs",
    ),
    "_shutdown": (agent, "`gradsync launch` ends ranks that do not stop"),
    "_remaining_restarts": (agent, "`gradsync launch` starts ranks again that were stopped"),
    "_popen": (lambda: SubprocessHandler, "`--rejoin` starts lost ranks again"),
    "_worker_group": (agent, "the same"),
    "_stdout": (lambda: made_with("_stdout", SubprocessHandler), "log files stay open"),
    "_stderr": (lambda: made_with("_stderr", SubprocessHandler), "log files stay open"),
    "_dynamo": (lambda: torch._C, "optimizers import the compiler"),
    "_functorch": (lambda: torch._C, "buffers are looked at inside of vmap"),
    "_FrameAction": (eval_frame, "optimizers import the compiler"),
    "_FrameExecStrategy": (eval_frame, "the same"),
}

OTHERWISE_TESTED = {
    "_dynamo_marked_constant",  # tests/ranks/test_buffer_changes.py compiles a sequence
    "_torchdynamo_disable",  # below: an optimizer leaves the compiler unloaded
    *("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),  # below
}


@pytest.mark.parametrize("name", CANARIES)
def test_torch_has_it_still(name: str) -> None:
    holder, breaks = CANARIES[name]
    assert hasattr(holder(), name), f"torch {torch.__version__} has no {name} there: {breaks}"


def test_every_name_has_a_canary() -> None:
    tree = ast.parse(Path(torch_private.__file__).read_text(encoding="utf-8"))
    texts = [
        *(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        *(node.name for node in ast.walk(tree) if isinstance(node, ast.alias)),
        *(str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)),
    ]
    found = {text for text in texts if text.isidentifier() and text[0] == "_" != text[1]}
    known = {name for name in CANARIES if not name.startswith("_saved_")} | OTHERWISE_TESTED
    assert found - {"_saved_"} == known


@pytest.mark.parametrize(
    ("cls", "name", "breaks"),
    [
        (LocalAgent, "_start_workers", "log files of ranks that are started again"),
        (LocalAgent, "_monitor_workers", "signals and exit codes of `gradsync launch`"),
    ],
)
def test_torch_calls_it_still(cls: type, name: str, breaks: str) -> None:
    """Private methods of torch's classes that ours replace."""
    assert name in vars(cls)
    assert hasattr(super(cls, cls), name), f"torch {torch.__version__} has no {name}: {breaks}"


def test_the_argument_that_leaves_buffers_alone() -> None:
    known = inspect.signature(DistributedDataParallel).parameters
    assert torch_private.DDP_WITHOUT_BUFFER_SYNC.keys() <= known.keys()


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("_dynamo/eval_frame.py", "self._orig_mod = mod"),
        ("distributed/fsdp/_common_utils.py", 'FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"'),
        (
            "distributed/algorithms/_checkpoint/checkpoint_wrapper.py",
            '_CHECKPOINT_WRAPPED_MODULE = "_checkpoint_wrapped_module"',
        ),
    ],
)
def test_where_wrappers_keep_the_module(file: str, line: str) -> None:
    """Read, not imported: the compiler alone takes a second."""
    assert line in (Path(torch.__file__).parent / file).read_text(encoding="utf-8")
    assert any(name in line for name in torch_private.WRAPPERS - {"module"})


_OPTIMIZER_PROGRAM = """
import sys, torch
from gradsync.core.torch_private import leave_compiler_unloaded

if "leave" in sys.argv:
    leave_compiler_unloaded()
    leave_compiler_unloaded()
loaded = []

def steps(optimizers, step=None):
    for optimizer in optimizers:
        optimizer.zero_grad()
        weight.square().sum().backward()
        (step or optimizer.step)()
        optimizer.load_state_dict(optimizer.state_dict())
        loaded.append("torch._dynamo" in sys.modules)
    return weight.tolist()

weight = torch.ones(3, requires_grad=True)
kinds = [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
optimizers = [kind([weight], lr=0.1) for kind in kinds]
found = [steps(optimizers)]
ran = set(loaded)

from torch._dynamo.testing import CompileCounter

whole, parts = CompileCounter(), CompileCounter()
found.append(steps(optimizers[1:2], torch.compile(optimizers[1].step, backend=whole)))
broken = torch.compile(lambda x: (x * 2, optimizers[0].zero_grad())[0] + 1, backend=parts)
found += [broken(torch.ones(2)).tolist(), steps(optimizers)]
print(found, whole.frame_count, parts.frame_count)
print(ran, file=sys.stderr)
"""


def test_optimizers_work_without_the_compiler_and_alike_once_it_is_there(tmp_path: Path) -> None:
    """Else every process pays a second for it; a compiled step is one graph, zero_grad ends one."""
    script = tmp_path / "program.py"
    script.write_text(_OPTIMIZER_PROGRAM)
    ours = run_python([script, "leave"]).ok()
    (torchs,) = run_forked([script])  # from a process that has it loaded
    torchs.ok()
    assert ours.stdout == torchs.stdout
    assert ours.stdout.endswith(" 1 2\n")
    assert ours.stderr.splitlines()[-1] == "{False}", "the compiler was imported"
