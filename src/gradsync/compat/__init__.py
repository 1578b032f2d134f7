"""Names that readers of other guides know, as thin wrappers of the same parts.

They are loaded on first use, as those of `gradsync` are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from gradsync.compat.loaders import DatasetLoader as DatasetLoader
    from gradsync.compat.manager import DDPManager as DDPManager
    from gradsync.compat.placement import place_parts as place_parts

_HOME_OF = {
    "DDPManager": "compat.manager",
    "DatasetLoader": "compat.loaders",
    "ElasticGPUConfig": "compat.elastic_gpu",
    "NaiveDDPTrainer": "compat.course",
    "frozen_parts": "compat.frozen",
    "get_device": "compat.functions",
    "init_distributed": "compat.functions",
    "is_main_process": "compat.functions",
    "log_gpu_memory": "compat.functions",
    "place_frozen": "compat.frozen",
    "place_parts": "compat.placement",
    "setup_distributed": "compat.functions",
    "shard_batch": "compat.course",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gradsync.compat' has no attribute {name!r}")
    return getattr(import_module(f"gradsync.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
