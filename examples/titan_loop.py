"""A loop in the manner of torchtitan: a Trainer with `train_step`, counted tokens, DCP checkpoints.

What goes: the device mesh, all-reducing and dividing by token counts, the norm over shards. `fsdp`
divides the model (FSDP2); checkpoints load on any number of ranks that divides 6.

torchrun --nproc-per-node 2 examples/titan_loop.py fsdp outputs/checkpoint
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradsync as gs

VOCAB, LENGTH, MICRO_BATCHES = 64, 32, 6


class Trainer:
    """Model, optimizer, and how many steps they have taken."""

    def __init__(self, world: gs.World, sync: str) -> None:
        self.world, self.step = world, 0
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB)).to(world.device)
        self.sync = gs.replicate(self.model, world, strategy=sync)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.parts = (self.model, self.optimizer)

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch `index` of this step, on any rank: counting, the end padded with -100."""
        generator = torch.Generator().manual_seed(self.step * MICRO_BATCHES + index)
        start = torch.randint(VOCAB, (4, 1), generator=generator)
        tokens = (start + torch.arange(LENGTH + 1)) % VOCAB
        labels = tokens[:, 1:].clone()
        labels[:, LENGTH - 4 * index :] = -100
        return tokens[:, :-1].to(self.world.device), labels.to(self.world.device)

    def train_step(self) -> float:
        """One step; returns the mean loss of a token, the same on all ranks."""
        mine = torch.arange(MICRO_BATCHES).chunk(self.world.world_size)[self.world.rank].tolist()
        for index in mine:
            inputs, labels = self.micro_batch(index)
            with self.sync.micro_step(last=index == mine[-1], index=index):
                logits = self.model(inputs).flatten(0, 1)
                loss = F.cross_entropy(logits, labels.flatten())
                self.sync.backward(loss, weight=int((labels != -100).sum()))
        self.step += 1
        return self.sync.step(self.optimizer, clip_norm=1.0).mean_loss

    def state(self) -> dict[str, Any]:
        """Content of a checkpoint; of what ranks divide, this rank's part."""
        model, optimizer = get_state_dict(*self.parts)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load(self, folder: str) -> None:
        """Continue from a checkpoint."""
        dcp.load(state := self.state(), checkpoint_id=folder)
        model, optimizer, self.step = state["model"], state["optimizer"], state["step"]
        set_state_dict(*self.parts, model_state_dict=model, optim_state_dict=optimizer)


def main(sync: str, folder: str) -> None:
    """Thirty steps, from the checkpoint if there is one."""
    with gs.init(seed=0, threads=1) as world:
        trainer = Trainer(world, sync)
        if Path(folder, ".metadata").exists():
            trainer.load(folder)
        losses = [trainer.train_step() for _ in range(30)]
        dcp.save(trainer.state(), checkpoint_id=f"{folder}-{trainer.step}")
        if world.is_main:
            print(f"step {trainer.step}, loss {losses[0]:.4f} to {losses[-1]:.4f}")


main(*sys.argv[1:])
