"""Data-parallel training in a dozen lines; the weights' hash is the same on any number of ranks.

python examples/minimal.py
torchrun --nproc-per-node 4 examples/minimal.py
"""

import torch

import gradsync as gs

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
with gs.init(seed=0, threads=1) as world:
    model = torch.nn.Linear(8, 1).to(world.device)
    sync = gs.replicate(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    for batch in gs.loader(data, world, global_batch_size=64, micro_batch_size=8, num_epochs=9):
        for micro_batch in batch:
            loss = (model(micro_batch.inputs) - micro_batch.targets).square().mean()
            sync.backward(loss, micro_batch)
        sync.step(optimizer)
    if world.is_main:
        print(f"loss {sync.mean_loss:.4f}, weights {gs.weights_sha256(model.named_parameters())}")
