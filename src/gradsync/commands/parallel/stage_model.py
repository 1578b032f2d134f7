"""One rank's part of the decoder: some blocks, and at the ends embedding, norm and head.

Tensor parallelism in a block divides heads and the SwiGLU's width over ranks. Shoeybi et al. 2019,
"Megatron-LM", arXiv 1909.08053: a matrix that computes heads (or hidden columns) is cut by outputs,
the next matrix by inputs, so that only its product is summed over shards:

    x ─ enter ─► q k v / gate up (columns) ─► attention / silu ─► out / down (rows) ─ leave ─► y
        backward: sum over shards                        forward: sum over shards

Between `leave` and the next `enter` every shard holds the same activations, bit for bit, because an
all-reduce gives all ranks the same bits. So norms, embedding and head are replicated and stay equal
without communication, and dropout there is the same on all shards.

[Note: Plain shards] Shards are plain tensors, not DTensors: our strategies sum flat memory, and any
of them can sum a plain gradient over the replicas of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.commands.models.gpt import (
    GPT,
    Block,
    SwiGLU,
    initial_weight,
    loss_sum,
    narrowed,
    rope_tables,
)
from gradsync.commands.parallel.layout import COLUMNS, EMBEDDING, ROWS, ModelPart
from gradsync.commands.parallel.split_sync import SplitGroups


class GPTStage(GPT):
    """`part` of a GPT, with the whole model's parameter names and the same start values.

    The other parts are never in memory, except for one matrix at a time while initial values are
    drawn: the generator has to pass through all of them.

    Shards sum over `groups.shards` in each block; the other arguments are those of `GPT`.
    """

    def __init__(
        self,
        part: ModelPart,
        groups: SplitGroups,
        *,
        seed: int,
        device: torch.device,
        activation_checkpointing: bool = False,
    ) -> None:
        with torch.device("meta"):
            super().__init__(part.config, activation_checkpointing=activation_checkpointing)
        self.part = part
        if EMBEDDING not in part.pieces():
            del self.embed
        if not part.is_last:
            del self.norm, self.head
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if number not in part.blocks:  # so that a block keeps its number in the whole model
                self.blocks[number] = nn.Identity()
            elif part.layout.tp > 1:
                divide_block(block, groups.shards)
        self.to_empty(device=device)
        self._init_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _init_weights(self, generator: torch.Generator) -> None:
        own, pieces = dict(self.named_parameters()), self.part.pieces()
        for weight in self.part.weights:
            drawn = initial_weight(weight.name, weight.shape, self.config.n_layer, generator)
            if weight.name in own:
                own[weight.name].copy_(drawn[pieces[weight.name].slices])
        cos_TK, sin_TK = rope_tables(self.config)
        self.rope_cos.copy_(cos_TK)
        self.rope_sin.copy_(sin_TK)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """From tokens_BT to x_BTC; later stages get the x_BTC of the one before them instead. On
        the last stage, after the norm."""
        x_BTC = self.dropout(self.embed(tokens_BT)) if self.part.is_first else tokens_BT
        x_BTC = self.through([self.blocks[number] for number in self.part.blocks], x_BTC)
        return self.norm(x_BTC) if self.part.is_last else x_BTC

    def loss(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """On the last stage: cross-entropy summed over the targets, as `GPT` computes it."""
        return loss_sum(self.logits(x_BTC), targets_BT)

    def pass_over_dropout(self, shape: Sequence[int]) -> None:
        """Draw what earlier stages draw for a micro-batch, so that this stage's dropout is the
        whole model's: one mask for the embedding, two for each block, whose branches have a linear
        layer's dtype. `shape` is x_BTC's."""
        if self.part.is_first:
            return
        stream = torch.zeros(shape, device=self.rope_cos.device)
        self.dropout(stream)
        for _ in range(2 * self.part.blocks.start):
            self.dropout(narrowed(stream))


def divide_block(block: Block, comm: Communicator) -> None:
    """Keep only this rank's shard of `block`, which is still on the meta device."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(mlp, SwiGLU), "GPT-2 is not split"

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0].view_as(inputs[0])  # its gradient is that of all layers which read it here
        if x.requires_grad:
            x.register_hook(lambda gradient: summed(gradient.clone()))
        return (x, *inputs[1:])

    def summed(x: Tensor) -> Tensor:
        """In place. One all-reduce over the shards, x's shape and dtype; nothing overlaps it."""
        x = x.contiguous()
        comm.all_reduce(x.detach()).wait()
        return x

    for part in (attention, mlp):
        part.register_forward_pre_hook(enter)
    for linear in (attention.q, attention.k, attention.v, mlp.gate, mlp.up):
        _keep_share(linear, comm, COLUMNS)
    for linear in (attention.out, mlp.down):
        _keep_share(linear, comm, ROWS)
        linear.register_forward_hook(lambda _, __, output: summed(output))
    attention.n_head //= comm.world_size
    attention.n_kv_head //= comm.world_size


def _keep_share(linear: nn.Linear, comm: Communicator, dim: int) -> None:
    """The layer keeps its share of outputs (columns) or of inputs (rows)."""
    assert linear.weight.is_meta, "nothing of the whole matrix is in memory"
    share = linear.weight.chunk(comm.world_size, dim)[0]
    linear.weight = nn.Parameter(torch.empty_like(share))
    linear.out_features, linear.in_features = share.shape
