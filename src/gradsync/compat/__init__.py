"""Names that readers of other guides know, as thin wrappers of the same parts."""

from gradsync.compat.course import NaiveDDPTrainer, shard_batch
from gradsync.compat.elastic_gpu import ElasticGPUConfig, frozen_parts, place_frozen
from gradsync.compat.functions import (
    get_device,
    init_distributed,
    is_main_process,
    log_gpu_memory,
    setup_distributed,
)
from gradsync.compat.manager import DatasetLoader, DDPManager
from gradsync.compat.placement import place_parts

__all__ = [
    "DDPManager",
    "DatasetLoader",
    "ElasticGPUConfig",
    "NaiveDDPTrainer",
    "frozen_parts",
    "get_device",
    "init_distributed",
    "is_main_process",
    "log_gpu_memory",
    "place_frozen",
    "place_parts",
    "setup_distributed",
    "shard_batch",
]
