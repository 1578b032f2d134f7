"""Importing this registers `shm`: torch.distributed's collectives through shared memory.

    import gradsync.backends
    torch.distributed.init_process_group("shm")                 # or "cpu:shm,cuda:nccl"

Programs with torch's DDP, FSDP2, Accelerate or Fabric stay as they are otherwise. Operations that
shared memory does not support (messages, gather, scatter, all-to-all, products, sparse tensors) go
through a gloo group over the same ranks. Where the ranks are not on one host, gloo does everything,
and rank 0 logs why.

CUDA tensors go through NCCL if there is one, whatever else `"cpu:shm,cuda:..."` names: torch does
not tell a group written in Python which backends were requested for other devices.

Under `torch.compile`, graphs end where a collective is called.

Accelerate uses an existing group: call `init_process_group` before `Accelerator()`.
Fabric: `DDPStrategy(process_group_backend="shm")`.

Sums are made in one order for all ranks, so all get the same bits; with three or more ranks gloo's
may differ from them in the last bit. Torch refuses two things for any backend but its own: before
2.15 `torch.distributed.monitored_barrier` (`dist.group.WORLD.monitored_barrier(timeout)` works),
and DDP's built-in hook `FP16_COMPRESS` (`default_hooks.fp16_compress_hook` works).
"""

from gradsync.backends.group import register

register()
