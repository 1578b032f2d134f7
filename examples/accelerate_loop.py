"""Accelerate's loop around `gs.replicate`: `accumulate`, `backward`, clipping stay as they are.

Two lines differ: the model is replicated in place of being given to `prepare`, and it gets the
`no_sync` by which `accumulate` has micro-batches add up.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py bucketed
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync as gs


def clouds(count: int = 4096) -> TensorDataset:
    """Points around four centres, float32 [N, 16], and whose they are, int64 [N]."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 16, generator=generator)
    targets = torch.arange(count) % 4
    return TensorDataset(
        centres[targets] + 0.5 * torch.randn(count, 16, generator=generator), targets
    )


def main(sync: str = "invariant") -> None:
    """Train a classifier of four clouds of points."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.process_index)  # ranks may start differently
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    model.to(accelerator.device)
    handle = gs.replicate(model, strategy=sync)
    model.no_sync = handle.no_sync
    optimizer, loader = accelerator.prepare(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(clouds(), batch_size=16, shuffle=True),
    )
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # every .grad is the mean over ranks
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    weights = gs.weights_sha256(model.named_parameters())
    hashes = accelerator.gather(torch.tensor([int(weights[:12], 16)])).unique()
    accelerator.print(f"loss {loss.item():.4f}, {len(hashes)} kind(s) of weights on the ranks")
    handle.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
