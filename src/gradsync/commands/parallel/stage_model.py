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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.comm.base import Communicator
from gradsync.commands.models.gpt import GPT, Block, SwiGLU, initial_weight, loss_sum, rope_tables
from gradsync.commands.parallel.layout import COLUMNS, ROWS, ModelPart
from gradsync.commands.parallel.split_sync import SplitGroups


class GPTStage(nn.Module):
    """`part` of a GPT, with the whole model's parameter names and the same start values.

    The other parts are never in memory, except for one matrix at a time while initial values are
    drawn: the generator has to pass through all of them.

    Shards sum over `groups.shards` in each block; the other arguments are those of `GPT`.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        part: ModelPart,
        groups: SplitGroups,
        *,
        seed: int,
        device: torch.device,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.part, self.config = part, part.config
        self.activation_checkpointing = activation_checkpointing
        with torch.device("meta"):
            whole = GPT(part.config)
        names = part.pieces()
        self.embed = whole.embed if "embed.weight" in names else None
        self.dropout = whole.dropout
        # Keys, not indices: a block keeps its number in the whole model.
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in part.blocks})
        self.norm = whole.norm if part.is_last else None
        self.head = whole.head if part.is_last else None
        if part.layout.tp > 1:
            for block in self.blocks.values():
                assert isinstance(block, Block)
                divide_block(block, groups.shards)
        self.register_buffer("rope_cos", whole.rope_cos, persistent=False)
        self.register_buffer("rope_sin", whole.rope_sin, persistent=False)
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

    def forward(self, x: Tensor) -> Tensor:
        """From tokens_BT (first stage) or x_BTC to x_BTC; on the last stage, after the norm."""
        x_BTC = x
        if self.part.is_first:
            assert self.embed is not None
            x_BTC = self.dropout(self.embed(x))
        T = x_BTC.shape[1]
        cos_TK, sin_TK = self.rope_cos[:T], self.rope_sin[:T]
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.blocks.values():
            if recompute:
                x_BTC = checkpoint(block, x_BTC, cos_TK, sin_TK, use_reentrant=False)
            else:
                x_BTC = block(x_BTC, cos_TK, sin_TK)
        return x_BTC if self.norm is None else self.norm(x_BTC)

    def loss(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """On the last stage: cross-entropy summed over the targets, as `GPT` computes it."""
        owner = self.embed if self.head is None else self.head
        assert owner is not None
        return loss_sum(F.linear(x_BTC, owner.weight), targets_BT)

    def pass_over_dropout(self, like_BTC: Tensor, branch_dtype: torch.dtype) -> None:
        """Draw what earlier stages draw for a micro-batch, so that this stage's dropout is the
        whole model's: one mask for the embedding, two for each block. `like_BTC` has the shape and
        dtype of the residual stream; a block's branches have dtype `branch_dtype`."""
        first = self.part.blocks.start
        if self.part.is_first or not self.config.dropout or not self.training:
            return
        self.dropout(torch.zeros_like(like_BTC))
        branch = torch.zeros_like(like_BTC, dtype=branch_dtype)
        for _ in range(2 * first):
            self.dropout(branch)


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
