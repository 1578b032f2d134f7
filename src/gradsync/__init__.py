"""gradsync: data-parallel training for PyTorch, the same script on 1..N ranks.

    import gradsync as gs

    with gs.init() as world:                        # python, torchrun, mpirun, srun, or nothing
        sync = gs.replicate(model, world)
        for step in gs.loader(dataset, world, global_batch_size=64, micro_batch_size=8):
            ...

Names are loaded on first use: importing gradsync imports no torch and has no side effects.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradsync.checkpoint.weights import weights_sha256 as weights_sha256
    from gradsync.comm.groups import group as group
    from gradsync.comm.groups import groups as groups
    from gradsync.comm.reductions import all_reduce as all_reduce
    from gradsync.compat.course import NaiveDDPTrainer as NaiveDDPTrainer
    from gradsync.compat.course import shard_batch as shard_batch
    from gradsync.compat.elastic_gpu import ElasticGPUConfig as ElasticGPUConfig
    from gradsync.compat.frozen import frozen_parts as frozen_parts
    from gradsync.compat.frozen import place_frozen as place_frozen
    from gradsync.compat.functions import get_device as get_device
    from gradsync.compat.functions import init_distributed as init_distributed
    from gradsync.compat.functions import is_main_process as is_main_process
    from gradsync.compat.functions import log_gpu_memory as log_gpu_memory
    from gradsync.compat.functions import setup_distributed as setup_distributed
    from gradsync.compat.manager import DDPManager as DDPManager
    from gradsync.data.loader import DatasetLoader as DatasetLoader
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
    from gradsync.plan.placement import place_parts as place_parts
    from gradsync.runtime.activity import expect_wait as expect_wait
    from gradsync.runtime.resolve import explain_world as explain_world
    from gradsync.runtime.session import init as init
    from gradsync.runtime.signals import StopRequest as StopRequest
    from gradsync.sync.comm_hook import comm_hook as comm_hook
    from gradsync.sync.replicate import replicate as replicate
    from gradsync.sync.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from gradsync.sync.sharded_state import gather_weights as gather_weights
    from gradsync.world import World as World

_HOMES = {
    "gradsync.checkpoint.weights": ("weights_sha256",),
    "gradsync.comm.groups": ("group", "groups"),
    "gradsync.comm.reductions": ("all_reduce",),
    "gradsync.data.loader": ("DatasetLoader", "loader"),
    "gradsync.data.streaming": ("stream_loader",),
    "gradsync.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "GradsyncError",
        "LaunchError",
        "PeerError",
        "RendezvousError",
        "RunError",
        "UsageError",
    ),
    "gradsync.compat.elastic_gpu": ("ElasticGPUConfig",),
    "gradsync.compat.frozen": ("frozen_parts", "place_frozen"),
    "gradsync.compat.functions": (
        "get_device",
        "init_distributed",
        "is_main_process",
        "log_gpu_memory",
        "setup_distributed",
    ),
    "gradsync.compat.manager": ("DDPManager",),
    "gradsync.compat.course": ("NaiveDDPTrainer", "shard_batch"),
    "gradsync.plan.placement": ("place_parts",),
    "gradsync.runtime.activity": ("expect_wait",),
    "gradsync.runtime.resolve": ("explain_world",),
    "gradsync.runtime.session": ("init",),
    "gradsync.runtime.signals": ("StopRequest",),
    "gradsync.sync.comm_hook": ("comm_hook",),
    "gradsync.sync.replicate": ("replicate",),
    "gradsync.sync.sharded_optimizer": ("ShardedOptimizer",),
    "gradsync.sync.sharded_state": ("gather_weights",),
    "gradsync.world": ("World",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604  one list of names, in `_HOMES`; a test compares it
    "__version__",
    *_HOME_OF,
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gradsync' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
