"""gradsync: data-parallel training for PyTorch, the same script on 1..N ranks.

    import gradsync as gs

    with gs.init() as world:                        # python, torchrun, mpirun, srun, or nothing
        sync = gs.replicate(model, world)
        for batch in gs.loader(dataset, world, global_batch_size=64, micro_batch_size=8):
            for micro_batch in batch:
                loss = F.cross_entropy(model(micro_batch.inputs), micro_batch.targets)
                sync.backward(loss, micro_batch)
            sync.step(optimizer)

Names are loaded on first use: importing gradsync imports no torch and has no side effects.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gradsync.checkpoint.weights import weights_sha256 as weights_sha256
    from gradsync.comm.groups import group as group
    from gradsync.comm.reductions import all_reduce as all_reduce
    from gradsync.comm.reductions import gather as gather
    from gradsync.data.loader import eval_loader as eval_loader
    from gradsync.data.loader import loader as loader
    from gradsync.data.streaming import stream_loader as stream_loader
    from gradsync.errors import CheckpointError as CheckpointError
    from gradsync.errors import ConfigError as ConfigError
    from gradsync.errors import DataError as DataError
    from gradsync.errors import GradsyncError as GradsyncError
    from gradsync.errors import LaunchError as LaunchError
    from gradsync.errors import PeerError as PeerError
    from gradsync.errors import RendezvousError as RendezvousError
    from gradsync.errors import RunError as RunError
    from gradsync.errors import UsageError as UsageError
    from gradsync.runtime.activity import expect_wait as expect_wait
    from gradsync.runtime.session import init as init
    from gradsync.sync.comm_hook import comm_hook as comm_hook
    from gradsync.sync.ownership.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from gradsync.sync.replicate import replicate as replicate
    from gradsync.sync.saving import load as load
    from gradsync.sync.saving import save as save
    from gradsync.world import World as World

_HOMES = {
    "gradsync.checkpoint.weights": ("weights_sha256",),
    "gradsync.comm.groups": ("group",),
    "gradsync.comm.reductions": ("all_reduce", "gather"),
    "gradsync.data.loader": ("eval_loader", "loader"),
    "gradsync.data.streaming": ("stream_loader",),
    "gradsync.errors": (
        *("CheckpointError", "ConfigError", "DataError", "GradsyncError", "LaunchError"),
        *("PeerError", "RendezvousError", "RunError", "UsageError"),
    ),
    "gradsync.runtime.activity": ("expect_wait",),
    "gradsync.runtime.session": ("init",),
    "gradsync.sync.comm_hook": ("comm_hook",),
    "gradsync.sync.replicate": ("replicate",),
    "gradsync.sync.saving": ("load", "save"),
    "gradsync.sync.ownership.sharded_optimizer": ("ShardedOptimizer",),
    "gradsync.world": ("World",),
}
_OF_OTHER_GUIDES = (
    *("DDPManager", "DatasetLoader", "ElasticGPUConfig", "NaiveDDPTrainer", "frozen_parts"),
    *("barrier", "broadcast", "cleanup_distributed", "get_device", "get_local_rank", "get_rank"),
    *("get_world_size", "init_distributed", "is_distributed", "is_main_process", "log_gpu_memory"),
    *("per_process_batch", "setup_distributed", "shard_batch"),
)
"""Names of `gradsync.compat`, which are found here too, and not listed."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604  one list of names, in `_HOMES`; a test compares it
    "__version__",
    *_HOME_OF,
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name, "gradsync.compat" if name in _OF_OTHER_GUIDES else None)
    if home is None:
        raise AttributeError(f"module 'gradsync' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
