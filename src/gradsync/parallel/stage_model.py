"""One rank's part of the decoder: some blocks, and at the ends embedding, norm and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.core.torch_private import mesh_of
from gradsync.models.gpt import GPT, Block, initial_weight, loss_sum, loss_sum_in_rows, rope_tables
from gradsync.parallel.groups import SplitGroups
from gradsync.parallel.partition import Part
from gradsync.parallel.tensor_shards import divide_block


class GPTStage(nn.Module):
    """`part` of a GPT, with the whole model's parameter names and the same start values.

    Nothing of the other parts is ever in memory, apart from one matrix at a time while start values
    are drawn: the generator has to pass through all of them.

    Args:
        part: which blocks, which shard.
        groups: of the layout; shards sum over `groups.shards` in each block.
        seed, activation_checkpointing, loss_rows: as for `GPT`.
        device: where it lives.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        part: Part,
        groups: SplitGroups,
        *,
        seed: int,
        device: torch.device,
        activation_checkpointing: bool = False,
        loss_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.part, self.config = part, part.config
        self.activation_checkpointing = activation_checkpointing
        self.loss_rows = loss_rows
        with torch.device("meta"):
            whole = GPT(part.config)
        names = part.pieces()
        self.embed = whole.embed if "embed.weight" in names else None
        self.dropout = whole.dropout
        # Keys, not places: a block keeps its number in the whole model.
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in part.blocks})
        self.norm = whole.norm if part.is_last else None
        self.head = whole.head if part.is_last else None
        if part.layout.tp > 1:
            assert isinstance(groups.shards, ProcessGroupCommunicator), "several ranks"
            mesh = mesh_of(groups.shards.group, device, self)
            for block in self.blocks.values():
                assert isinstance(block, Block)
                divide_block(block, mesh, groups.shards)
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
        for buffer, table in zip(
            (self.rope_cos, self.rope_sin), rope_tables(self.config), strict=True
        ):
            buffer.copy_(table)

    def forward(self, x: Tensor) -> Tensor:
        """From tokens_BT (first stage) or x_BTC to x_BTC, on the last stage behind the norm."""
        x_BTC = x if self.embed is None or not self.part.is_first else self._embedded(x)
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
        if self.loss_rows is None:
            return loss_sum(F.linear(x_BTC, owner.weight), targets_BT)
        rows = x_BTC.flatten(0, 1), owner.weight, targets_BT.flatten()
        return loss_sum_in_rows(*rows, self.loss_rows)

    def pass_over_dropout(self, like_BTC: Tensor, branch_dtype: torch.dtype) -> None:
        """Draw what the stages before this one draw for a leaf, so that this one's dropout is the
        whole model's: one mask of the embedding, two of each block.

        Args:
            like_BTC: of the residual stream's shape and dtype.
            branch_dtype: of what a block's branches give.
        """
        first = self.part.blocks.start
        if self.part.is_first or not self.config.dropout or not self.training:
            return
        self.dropout(torch.zeros_like(like_BTC))
        branch = torch.zeros_like(like_BTC, dtype=branch_dtype)
        for _ in range(2 * first):
            self.dropout(branch)

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        assert self.embed is not None
        return self.dropout(self.embed(tokens_BT))
