"""A ring all-reduce made of sends among 2, 3 and 4 ranks, its bytes counted.

torchrun --nproc-per-node 4 examples/claims/ring.py
"""

import torch
import torch.distributed as dist

import gradsync as gs


def ring(data: torch.Tensor, n: int) -> int:
    """Sum `data` over ranks 0 to n - 1, in place; returns the bytes that this rank sent."""
    rank, sent = dist.get_rank(), 0
    chunks = data.view(n, -1)
    for step in range(2 * (n - 1)):
        gather = step >= n - 1
        leaves = (rank - step) % n
        received = torch.empty_like(chunks[0])
        sending = dist.isend(chunks[leaves].clone(), (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        sending.wait()
        sent += received.nbytes
        chunks[leaves - 1] = received if gather else chunks[leaves - 1] + received
        if rank == 0 and n == 4:
            phase, held = "all-gather" if gather else "reduce-scatter", chunks[:, 0].int().tolist()
            print(f"N = 4, step {step + 1}, {phase}: chunks of rank 0 are sums of {held} ranks")
    return sent


with gs.init(threads=1) as world:
    for n in (2, 3, 4):
        data = torch.ones(12 * 1024)
        if world.rank < n:
            sent = ring(data, n)
            assert bool((data == n).all())
        if world.is_main:
            print(f"N = {n}: a rank sends {sent:,} bytes, {sent / data.nbytes:.3f} S")
