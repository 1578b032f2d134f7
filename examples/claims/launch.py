"""Variables that torch needs before ranks can meet, and the backends of its wheel.

WORLD_SIZE=4 RANK=0 LOCAL_RANK=0 python examples/claims/launch.py
"""

import torch.distributed as dist

try:
    dist.init_process_group("gloo")
except ValueError as error:
    print(f"the three variables alone: ValueError: {error}")
print(f"backends: gloo {dist.is_gloo_available()}, mpi {dist.is_mpi_available()}")
