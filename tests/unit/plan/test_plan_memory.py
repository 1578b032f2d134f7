"""Memory of a rank: activations against what autograd really keeps, to the byte; the rest by hand
for small shapes, and what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from gradsync.commands.models.config import PRESETS, GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.memory import (
    CPU_PROCESS,
    FP32,
    Case,
    activations,
    memory_need,
    most_open_nodes,
    strategy_memory,
)
from gradsync.commands.plan.workload import Split, Workload
from gradsync.data.batch_plan import share
from gradsync.errors import ConfigError
from gradsync.sync.buckets import push_leaf
from gradsync.sync.registry import STRATEGIES

MIB = 2**20
MODEL = PRESETS["small"]
S = 4 * MODEL.num_params()
"""Bytes of the gradients of all parameters."""
WORK = Workload(model=MODEL, micro_batch_size=2, seq_len=512, num_leaves=8, kind="cpu")
ONE_LEAF = replace(WORK, num_leaves=2)


def split(strategy: str, *, shared_weights: bool = False, **sizes: int) -> Split:
    return Split(
        strategy=strategy,
        layout=ParallelLayout(**(sizes or {"dp": 2})),
        shared_weights=shared_weights,
    )


def parts(strategy: str, work: Workload = ONE_LEAF, **sizes: int) -> dict[str, int]:
    """Weights, optimizer, and gradients and buckets at each moment."""
    found = strategy_memory(Case(work, split(strategy, **sizes)))
    moments = {"loss": found.loss, "backward": found.backward, "update": found.update}
    return {"weights": found.weights, "optimizer": found.optimizer} | {
        name: moment.gradients + moment.buckets for name, moment in moments.items()
    }


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_more_of_anything_needs_more(name: str, kind: Any) -> None:
    work = replace(WORK, kind=kind)
    whole = memory_need(work, split(name))
    assert all(getattr(whole, field) >= 0 for field in whole.__slots__)
    need = whole.total
    assert need > S
    larger = [
        replace(work, model=replace(MODEL, n_layer=13)),
        replace(work, model=replace(MODEL, n_embd=816)),
        replace(work, model=replace(MODEL, vocab_size=60_000)),
        replace(work, micro_batch_size=3),
        replace(work, seq_len=600),
    ]
    assert all(memory_need(each, split(name)).total > need for each in larger)
    assert memory_need(replace(work, activation_checkpointing=True), split(name)).total < need


TABLE = 4 * MODEL.vocab_size * MODEL.n_embd
"""While the embedding's gradient is made, it is not in .grad yet."""


@pytest.mark.parametrize(
    ("strategy", "work", "loss", "backward", "update"),
    [
        ("flat", ONE_LEAF, S, S, S),
        ("ddp", ONE_LEAF, S, S, S),
        ("ddp", WORK, 2 * S, 2 * S, S),  # leaves before the last add up beside DDP's buckets
        ("naive", ONE_LEAF, 0, S - TABLE, S),
        ("naive", WORK, S, S, S),
        ("local_sgd", ONE_LEAF, 0, S - TABLE, S),
        ("bf16", ONE_LEAF, S, S + S // 2, S),
        ("diloco", ONE_LEAF, 2 * S, 3 * S - TABLE, 4 * S),
        ("invariant", replace(WORK, num_leaves=6), 2 * S, 2 * S, 2 * S),  # two nodes of the tree
    ],
)
def test_states_by_hand(
    strategy: str, work: Workload, loss: int, backward: int, update: int
) -> None:
    expected = {"weights": S, "optimizer": 2 * S}
    expected |= {"loss": loss, "backward": backward, "update": update}
    assert parts(strategy, work) == expected


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replicas_divide_what_each_stage_of_zero_says(ranks: int) -> None:
    work = replace(WORK, num_leaves=ranks)
    one, two, three = (parts(name, work, dp=ranks) for name in ("zero1", "zero2", "fsdp"))
    assert one["weights"] == two["weights"] == S
    assert one["optimizer"] == two["optimizer"] == three["optimizer"] == -(-2 * S // ranks)
    assert three["weights"] == three["update"] == -(-S // ranks)
    assert one["loss"] == S
    assert two["loss"] == 0
    # Outside of the blocks everything is whole until the step ends.
    root = 4 * Case(work, split("fsdp", dp=ranks)).root_params
    assert three["loss"] == root
    assert three["backward"] == -(-S // ranks) + 3 * root  # weights, gradients, what is sent


def test_one_replica_has_nobody_to_talk_to() -> None:
    for name in ("ddp", "fsdp", "powersgd"):
        assert memory_need(WORK, split(name, dp=1)) == memory_need(WORK, split("naive", dp=1))


def test_ranks_of_a_host_share_one_copy() -> None:
    own = memory_need(ONE_LEAF, split("invariant"))
    shared = memory_need(ONE_LEAF, split("invariant", shared_weights=True))
    rope = 2 * 4 * MODEL.block_size * MODEL.head_dim
    assert shared.weights == S // 2 + rope
    assert shared.optimizer == own.optimizer // 2 == S
    assert shared.gradients == own.gradients == S


def test_the_tree_keeps_a_buffer_for_each_open_node() -> None:
    # 3 leaves a rank: 0 1 2 | 3 4 5: at most (0, 1) and 2; 3 and (4, 5).
    assert [most_open_nodes(leaves, 2) for leaves in (2, 4, 6, 14)] == [1, 1, 2, 3]
    for leaves, ranks in product(range(1, 40), range(1, 9)):
        most = 1
        for rank in range(ranks if leaves > ranks else 0):
            nodes = []
            for leaf in share(leaves, rank, ranks):
                push_leaf(nodes, leaf)
                most = max(most, len(nodes))
        assert most_open_nodes(leaves, ranks) == most
    assert parts("zero1", replace(WORK, num_leaves=6))["loss"] == 2 * S
    assert parts("powersgd")["loss"] == 2 * S


def test_a_stage_holds_its_blocks_and_its_leaves() -> None:
    work = replace(WORK, num_leaves=16, kind="cuda")
    two = [Case(work, split("naive", pp=2), stage) for stage in (0, 1)]
    table, width = MODEL.vocab_size * MODEL.n_embd, MODEL.n_embd
    # The tied embedding lies on both ends.
    assert [case.blocks for case in two] == [6, 6]
    assert sum(case.num_params for case in two) == MODEL.num_params() + table
    assert two[1].num_params == 6 * two[1].block_params + width + table
    divided = split("naive", pp=4)
    for leaves, in_flight in ((16, [4, 3, 2, 1]), (2, [2, 2, 2, 1])):
        few = replace(work, num_leaves=leaves)
        assert [Case(few, divided, stage).leaves_in_flight for stage in range(4)] == in_flight
    few_words = replace(work, model=replace(MODEL, vocab_size=256))
    first = memory_need(few_words, divided)
    leaf = activations(few_words, blocks=3)
    assert first.activations == 4 * (leaf.kept + leaf.stream)
    eager = memory_need(work, split("naive", pp=2))
    assert eager.optimizer < memory_need(work, split("naive", dp=1)).optimizer


def test_shards_divide_the_matrices_of_blocks() -> None:
    one, two = (Case(WORK, split("naive", tp=size)) for size in (1, 2))
    norms = 2 * MODEL.n_embd
    assert two.block_params == (one.block_params - norms) // 2 + norms
    assert two.root_params == one.root_params
    need = [memory_need(WORK, split("naive", tp=size)) for size in (1, 2)]
    assert need[1].activations < need[0].activations
    assert need[1].logits == need[0].logits
    with pytest.raises(ConfigError, match="tp=5 does not divide"):
        memory_need(WORK, split("naive", tp=5))


def test_the_head_by_hand() -> None:
    work = replace(ONE_LEAF, micro_batch_size=1)
    need = memory_need(work, split("naive"))
    assert need.logits == 12 * 512 * MODEL.vocab_size
    assert need.workspace == 2 * MODEL.vocab_size * MODEL.n_embd  # the head's bf16 copy
    assert need.process == CPU_PROCESS
    exact = memory_need(replace(work, dtype="fp32"), split("naive"))
    assert exact.logits == need.logits


def test_the_model_as_it_was_built_counts() -> None:
    """The heap does not shrink: where weights have moved to shared memory, their place is held."""
    tiny_leaf = replace(ONE_LEAF, micro_batch_size=1, seq_len=8, activation_checkpointing=True)
    need = memory_need(tiny_leaf, split("invariant", shared_weights=True))
    loose = need.activations + need.logits + need.workspace
    assert need.slack >= min(S - loose, int(0.3 * loose))
    small_table = replace(tiny_leaf, model=replace(MODEL, vocab_size=256), num_leaves=64)
    many = memory_need(replace(small_table, kind="cuda"), split("fsdp", dp=64))
    whole = 4 * small_table.model.num_params()
    assert many.total - many.process == pytest.approx(whole, rel=0.01)


PLAIN = GPTConfig(n_layer=3, n_head=4, n_embd=64, vocab_size=96, block_size=32)
GROUPED = replace(PLAIN, n_kv_head=2, dropout=0.1, hidden_dim=200)
GPT2 = replace(PLAIN, architecture="gpt2", bias=True)


def leaf_work(model: GPTConfig, **about: Any) -> Workload:
    usual = {"micro_batch_size": 1, "seq_len": 8, "num_leaves": 1, "kind": "cpu"}
    return Workload(model=model, **usual | about)


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
@pytest.mark.parametrize("model", [PLAIN, GROUPED, GPT2], ids=["plain", "grouped, dropout", "gpt2"])
def test_a_leaf_keeps_what_is_counted(model: GPTConfig, dtype: Any, checkpointing: bool) -> None:
    how = {"dtype": dtype, "activation_checkpointing": checkpointing}
    work = leaf_work(model, micro_batch_size=2, seq_len=24, **how)
    leaf = activations(work, blocks=model.n_layer)
    # The norm's own part of `last_norm`: the head's input is made by the head.
    head_input = work.leaf_tokens * model.n_embd * (2 if dtype == "bf16" else FP32)
    assert saved_bytes(work) == leaf.kept + leaf.last_norm - head_input


def test_one_block_by_hand() -> None:
    # C = 64, F = 192, H = 4: 2 norms (8 C + 4), 2 casts (2 C), q k v and result (2 C), logsumexp,
    # 4 widths of the SwiGLU (2 F); and 2 bytes of each matrix.
    work = leaf_work(PLAIN, seq_len=10)
    token = 2 * (8 * 64 + 4) + 2 * 128 + 4 * 128 + 4 * 4 + 4 * 2 * 192
    matrices = 4 * 64 * 64 + 3 * 64 * 192
    assert activations(work, blocks=1).block == 10 * token + 2 * matrices
    assert activations(work, blocks=0).recomputed == 0
    # An activation of the whole stream is whole on each of two shards.
    whole = 2 * (8 * 64 + 4) + 2 * 128
    halves = 10 * (whole + (token - whole) // 2) + matrices
    assert activations(work, blocks=1, tp=2).block == halves


def test_masks_are_bool_on_cuda() -> None:
    on_cpu, on_cuda = (activations(leaf_work(GROUPED, kind=kind), 1) for kind in ("cpu", "cuda"))
    assert on_cpu.kept - on_cuda.kept == 8 * 64 * (2 * (2 - 1) + (4 - 1))
