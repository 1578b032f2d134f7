"""Names that readers of other guides know, as thin wrappers of the same parts."""

from gradsync.compat.course import NaiveDDPTrainer, shard_batch
from gradsync.compat.elastic_gpu import ElasticGPUConfig, frozen_parts
from gradsync.compat.functions import (
    barrier,
    broadcast,
    cleanup_distributed,
    get_device,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_distributed,
    is_main_process,
    log_gpu_memory,
    per_process_batch,
    setup_distributed,
)
from gradsync.compat.manager import DatasetLoader, DDPManager

__all__ = [
    "DDPManager",
    "DatasetLoader",
    "ElasticGPUConfig",
    "NaiveDDPTrainer",
    "barrier",
    "broadcast",
    "cleanup_distributed",
    "frozen_parts",
    "get_device",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_distributed",
    "is_main_process",
    "log_gpu_memory",
    "per_process_batch",
    "setup_distributed",
    "shard_batch",
]
