"""Handwritten digits: a convnet with BatchNorm, whose running statistics are the same on all ranks.

python examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py

Needs scikit-learn, which brings the 1,797 images along: nothing is downloaded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradsync as gs


def digits() -> tuple[Tensor, Tensor]:
    """Images, float32 [1797, 1, 8, 8] in 0..1, and which digit they show, int64 [1797]; mixed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images, dtype=torch.float32) / 16
    return pixels.reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[order]


def block(channels_in: int, channels_out: int) -> nn.Module:
    """Convolution, BatchNorm, ReLU: [B, channels_in, H, W] to [B, channels_out, H/2, W/2]."""
    conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2))


images, labels = digits()
train_set = TensorDataset(images[:1437], labels[:1437])
held_out = TensorDataset(images[1437:], labels[1437:])

with gs.init(seed=0, threads=1) as world:
    model = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(128, 10))
    model = model.to(world.device)
    # "local": each micro-batch of 16 images is normalised alone, running statistics are the mean
    # over micro-batches. So the numbers printed below do not depend on the number of ranks.
    sync = gs.replicate(model, world, batch_norm="local")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = gs.loader(train_set, world, global_batch_size=64, micro_batch_size=16, num_epochs=6)
    for batch in loader:
        for micro_batch in batch:
            loss = F.cross_entropy(model(micro_batch.inputs), micro_batch.targets)
            sync.backward(loss, micro_batch)
        sync.step(optimizer)
        if world.is_main and batch.number % 30 == 0:
            print(f"step {batch.number}: loss {sync.mean_loss:.6f}")

    correct = torch.zeros((), dtype=torch.int64)
    for micro_batch in gs.eval_loader(held_out, world, micro_batch_size=64):
        with torch.no_grad():
            guesses = model.eval()(micro_batch.inputs).argmax(dim=1)
        correct += (guesses == micro_batch.targets).sum().cpu()
    gs.all_reduce(correct)
    if world.is_main:
        accuracy = correct.item() / len(held_out)
        print(f"accuracy on {len(held_out)} images not seen in training: {accuracy:.2%}")
