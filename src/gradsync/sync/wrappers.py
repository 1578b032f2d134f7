"""Refusal of models that torch or another library synchronises already.

Two mechanisms on one model communicate every gradient twice. The result depends on the order of
hooks: in the user's training loop under `invariant` the gradient is no mean any more, and with
unequal numbers of leaves ranks wait for each other for ever. So it is refused, by name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from gradsync.core.torch_private import active_ddp
from gradsync.errors import ConfigError
from gradsync.sync.module_hook import ModuleHook
from gradsync.sync.reducer import Reducer

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("gradsync")

_ADVICE = {
    "DistributedDataParallel": (
        "torch's DistributedDataParallel synchronises this model already (Accelerate, Fabric and "
        "transformers' Trainer wrap models in it): train the plain model that gs.replicate was "
        "given, or keep the wrapper without gs.replicate, with gs.comm_hook(...) for our reductions"
    ),
    "FullyShardedDataParallel": (
        "torch's FSDP has sharded this model already and synchronises it: give gs.replicate the "
        "plain model, with sync='fsdp'"
    ),
    "DeepSpeedEngine": "DeepSpeed synchronises this model already: give gs.replicate the plain one",
}
_KINDS = {
    "DDP": "DistributedDataParallel",  # of torch.distributed._composable.replicate
    "FSDPModule": "FullyShardedDataParallel",  # of fully_shard
} | {name: name for name in _ADVICE}


def refuse_synchronised(model: nn.Module) -> None:
    """Check classes by name before `model` is replicated: importing FSDP to check costs too much.

    Raises:
        ConfigError: another mechanism synchronises it, or a part of it.
    """
    for part in model.modules():
        known = ("torch.", "deepspeed.")
        classes = [c for c in type(part).__mro__ if c.__module__.startswith(known)]
        names = {each.__name__ for each in classes}
        if found := names & _KINDS.keys():
            raise ConfigError(_ADVICE[_KINDS[found.pop()]])
        if "DataParallel" in names:
            log.warning(
                "torch's DataParallel splits each leaf over all GPUs that this process sees, which "
                "other ranks of this host use too: give gs.replicate the plain model, and start "
                "one rank for each GPU"
            )


def refuse_ddp_around(model: nn.Module, reducer: Reducer) -> Any:
    """Watch for forwards of `model` through torch's DDP, whenever that was wrapped around it;
    returns the hook's handle, to remove it."""
    parameter, own = reducer.parameters[0], getattr(reducer, "ddp", None)

    def before_forward(*_: Any) -> None:
        ddp = active_ddp()
        if ddp is None or ddp is own or not torch.is_grad_enabled():
            return
        if any(parameter is its for its in ddp.module.parameters()):
            raise ConfigError(_ADVICE["DistributedDataParallel"])

    return model.register_forward_pre_hook(ModuleHook(before_forward))
