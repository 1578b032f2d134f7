"""Names that readers of other guides know, as thin wrappers of the same parts."""

from gradsync.compat.course import NaiveDDPTrainer, shard_batch
from gradsync.compat.elastic_gpu import ElasticGPUConfig, frozen_parts
from gradsync.compat.functions import (
    get_device,
    init_distributed,
    is_main_process,
    log_gpu_memory,
    setup_distributed,
)
from gradsync.compat.manager import DatasetLoader, DDPManager

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
    "setup_distributed",
    "shard_batch",
]
