"""Importing this registers `shm`: torch.distributed's collectives through shared memory.

    import gradsync.backends
    torch.distributed.init_process_group("shm")                 # or "cpu:shm,cuda:nccl"

Programs with torch's DDP, FSDP2, Accelerate or Fabric stay as they are otherwise. What shared
memory does not do (messages, gather, scatter, all-to-all, products, sparse tensors) goes through a
gloo group over the same ranks. Where the ranks are not on one host the whole group is gloo, and
rank 0 says why.

Results come in one order of summation on all ranks, so all ranks get the same bits; gloo's may
differ from them in the last bit. `torch.distributed.monitored_barrier` looks at the backend's name
and takes only "gloo"; `torch.distributed.group.WORLD.monitored_barrier(timeout)` works.
"""

from gradsync.backends.create import register

register()
