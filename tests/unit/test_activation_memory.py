"""The count of activations against what autograd really keeps, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradsync.models.config import GPTConfig
from gradsync.models.gpt import GPT
from gradsync.plan.activations import FP32, Activations
from gradsync.plan.workload import Workload

PLAIN = GPTConfig(n_layer=3, n_head=4, n_embd=64, vocab_size=96, block_size=32)
GROUPED = replace(PLAIN, n_kv_head=2, dropout=0.1, hidden_dim=200)


def saved_bytes(work: Workload) -> int:
    """Bytes of the distinct tensors that forward keeps for backward, but parameters, buffers and
    inputs."""
    model = GPT(work.model, activation_checkpointing=work.activation_checkpointing)
    tokens = torch.zeros(work.micro_batch_size, work.seq_len, dtype=torch.int64)
    known = [*model.parameters(), *model.buffers(), tokens]
    seen = {each.untyped_storage().data_ptr() for each in known}
    kept: list[torch.Tensor] = []
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
        kept.append(tensor)  # or its address could come again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bf16"),
    ):
        model.features(tokens)
    return total


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("model", [PLAIN, GROUPED], ids=["plain", "grouped, dropout"])
def test_a_leaf_keeps_what_is_counted(model: GPTConfig, dtype: Any, checkpointing: bool) -> None:
    work = Workload(
        model=model,
        micro_batch_size=2,
        seq_len=24,
        num_leaves=1,
        dtype=dtype,
        activation_checkpointing=checkpointing,
        kind="cpu",
    )
    leaf = Activations(work, blocks=model.n_layer)
    # The norm's own part of `last_norm`: the head's input is made by the head.
    head_input = work.leaf_tokens * model.n_embd * (2 if dtype == "bf16" else FP32)
    assert saved_bytes(work) == leaf.kept + leaf.last_norm - head_input


def test_one_block_by_hand() -> None:
    # C = 64, F = 192, H = 4: 2 norms (8 C + 4), 5 casts (2 C), q k v and result (2 C), logsumexp,
    # 4 widths of the SwiGLU (2 F); and 2 bytes of each matrix.
    work = Workload(model=PLAIN, micro_batch_size=1, seq_len=10, num_leaves=1, kind="cpu")
    token = 2 * (8 * 64 + 4) + 5 * 128 + 4 * 128 + 4 * 4 + 4 * 2 * 192
    matrices = 4 * 64 * 64 + 3 * 64 * 192
    assert Activations(work, blocks=1).block == 10 * token + 2 * matrices
    assert Activations(work, blocks=0).recomputed == 0
    # What is computed from the whole stream is whole on each of two shards.
    whole = 2 * (8 * 64 + 4) + 5 * 128
    halves = 10 * (whole + (token - whole) // 2) + matrices
    assert Activations(work, blocks=1, tp=2).block == halves


def test_masks_are_bool_on_cuda() -> None:
    on_cpu = Workload(model=GROUPED, micro_batch_size=1, seq_len=8, num_leaves=1, kind="cpu")
    leaf = Activations(on_cpu, blocks=1)
    on_cuda = Activations(replace(on_cpu, kind="cuda"), blocks=1)
    assert leaf.kept - on_cuda.kept == 8 * 64 * (2 * (2 - 1) + (4 - 1))
