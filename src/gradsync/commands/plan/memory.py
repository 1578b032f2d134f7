"""Memory that a rank needs to train, in bytes, by closed formulas; no torch.

Memory can peak at a few moments of a step; the need is the largest of them, on the pipeline stage
that needs most. N tokens of a micro-batch, V vocabulary, C width, e bytes of an element in which
products are computed (2 under autocast, 4 in fp32):

    loss       blocks' activations, last norm, and for the head
               whole: 12 N V (logarithms of probabilities, the gradients of these and of logits)
               in R rows: 4 V C (gradient of the head) + (8 + 4 e) R V
    head       activations, e N V (gradient of the logits), (e + e + 4) V C (the head's 16-bit copy,
               its gradient in 16 bits and in fp32)
    block      activations, one block's own gradients, what checkpointing recomputes
    backward   all gradients, and the embedding's once more (two when it is tied: the head's waits
               until the embedding's comes)
    update     activations are gone: all gradients, optimizer; what the strategy gathers

Gradients, optimizer state and buffers are the strategy's: S = 4 x parameters of the rank (gradients
are fp32), W replicas, k micro-batches of a rank, b the largest bucket (bytes). AdamW keeps two fp32
moments: 2 S (arXiv 1412.6980). ZeRO (arXiv 1910.02054, section 3.1) counts the same 16 bytes a
parameter with weights and gradients, and divides them by W stage by stage.

[Note: Activations] Counted tensor by tensor. With G = K x key/value heads, F width of the SwiGLU
and H heads, a block keeps, in bytes a token (after Korthikanti et al. 2022, arXiv 2205.05198,
section 4, recounted for this decoder, with fp32 RMSNorm and fused attention; GPT-2's norms keep 4 C
+ 8, its GELU 2 e F after a single matrix):

    two norms          2 (4 C + 4 C + 4)   the residual stream, the normalised, 1 / root mean square
    inputs of q, k, v  3 e C               autocast casts each time; fp32: one C for all, 4 C
    attention          e (2 C + 2 G) + 4 H q, k, v, the result (`out` needs it too), logsumexp
    inputs of gate, up 2 e C               likewise; fp32: 4 C
    SwiGLU             4 e F               gate, silu(gate), up, their product

and under autocast a 16-bit copy of each weight that it multiplies by. A test counts the same with
torch's saved-tensor hooks, to the byte. The count is the CPU's: on CUDA the fused RMSNorm does not
keep the normalised input, so it is an upper bound there.

[Note: Shared pages] With `Split.shared_weights` (and for gradients in shared memory) a rank counts
its share: what all ranks of the host map, divided by their number (as PSS does, not RSS).

[Note: Slack] On a CPU: what glibc's heap holds unused, with `keep_freed_memory`. glibc before 2.38
cannot put an aligned block, as torch asks for, into a hole of the same size (bug 14581). So a part
stays unused of what a micro-batch takes (CPU_SLACK), of a block that is computed twice
(RECOMPUTE_SLACK), of blocks that `fsdp` gathers (GATHER_SLACK), of buffers that each step allocates
again (RENEW_SLACK), and of what moves into shared memory (MOVE_SLACK). Fitted to peaks of 16
strategies at two sizes (benchmarks/memory of commit 8ff7521). The heap never shrinks below the
model as it was built. On CUDA: what torch's allocator reserves (CUDA_SLACK), a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import NamedTuple

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import (
    EMBEDDING,
    Coordinates,
    ModelPart,
    ParallelLayout,
    check_divisible,
)
from gradsync.commands.plan.workload import Split, Workload, shares_memory
from gradsync.data.batch_plan import share
from gradsync.sync.layout import Item, plan_buckets
from gradsync.sync.options import Recipe
from gradsync.sync.registry import find_strategy

MIB = 2**20
CPU_PROCESS = 333 * MIB
"""Python, torch and gradsync after a step of an empty model; measured, torch 2.13, x86-64."""
CUDA_PROCESS = 1024 * MIB  # CUDA context, kernels, cuBLAS workspace and NCCL's buffers; a default
CPU_SLACK, RECOMPUTE_SLACK, GATHER_SLACK, RENEW_SLACK, MOVE_SLACK = 0.45, 2.0, 3.0, 0.2, 0.4
CUDA_SLACK = 0.1  # See [Note: Slack]
_IN_FLIGHT = 3  # Buckets that the sharded optimizer holds: one updated, two in flight
FP32, _HALF = 4, 2  # Bytes of an element


@cache
def _parameters(model: GPTConfig, layout: ParallelLayout, stage: int) -> Mapping[str, int]:
    """Elements of each parameter of a rank on this stage, in `named_parameters` order; all shards
    of a stage are alike. ConfigError if the model cannot be divided this way."""
    check_divisible(model, layout)
    part = ModelPart(config=model, layout=layout, place=Coordinates(data=0, stage=stage, shard=0))
    return {name: prod(piece.shape) for name, piece in part.pieces().items()}


class Activations(NamedTuple):
    """Bytes that one rank holds for one micro-batch."""

    element: int  # Of one element in which products are computed
    weight_copies: int  # 16-bit copies of one block's matrices; 0 in fp32
    block: int  # All that one block keeps, see [Note: Activations]
    stream: int  # The residual stream at one place, fp32
    kept: int  # By all blocks; with checkpointing, the stream before each (arXiv 1604.06174)
    recomputed: int  # One block's, recomputed in backward; 0 without checkpointing
    last_norm: int  # The norm before the head, and the head's input


def activations(work: Workload, blocks: int, tp: int = 1) -> Activations:
    """The bytes of a rank that holds `blocks` blocks in `tp` shards.

    [Note: Tensor shards] Heads, the SwiGLU's width and the weights' copies are divided by `tp`.
    The residual stream and what is computed from all of it (norms, inputs of q, k, v, gate and up)
    is whole on every shard, as in Korthikanti et al. without sequence parallelism.
    """
    model, width, tokens = work.model, work.model.n_embd, work.leaf_tokens
    kv_width, is_fp32 = model.num_kv_heads * model.head_dim, work.dtype == "fp32"
    size = FP32 if is_fp32 else _HALF
    gates = 1 if model.is_gpt2 else 2  # Matrices that produce hidden columns
    norm = FP32 * (width + 2) if model.is_gpt2 else FP32 * (2 * width + 1)

    def mask(element: int) -> int:
        """A token's dropout: in the masked tensor's dtype on a CPU, bool on CUDA."""
        return width * (1 if work.kind == "cuda" else element) if model.dropout else 0

    matrices = 2 * width * width + 2 * width * kv_width
    matrices += (gates + 1) * width * model.mlp_dim
    copies = 0 if is_fp32 else _HALF * matrices // tp
    whole = 2 * (norm + size * width)
    parts = size * (2 * width + 2 * kv_width) + FP32 * model.n_head
    parts += 2 * gates * size * model.mlp_dim
    block = tokens * (whole + parts // tp + 2 * mask(size)) + copies
    stream, recomputes = FP32 * tokens * width, work.activation_checkpointing
    return Activations(
        element=size,
        weight_copies=copies,
        block=block,
        stream=stream,
        kept=blocks * (stream if recomputes else block) + tokens * mask(FP32),
        recomputed=block if recomputes and blocks else 0,
        last_norm=tokens * (norm + size * width),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyMemory:
    """Bytes of one rank under one strategy, at the moments of its last micro-batch."""

    weights: int  # All the time; with one copy per host, a rank's share. Likewise `optimizer`.
    optimizer: int
    loss: MemoryNeed  # Gradients and buckets when forward is over; likewise at two later moments
    backward: MemoryNeed  # All gradients exist, nothing else except the embedding's gradient
    update: MemoryNeed
    fresh: int  # The embedding's gradients, just made by backward, in addition to `backward`
    gathered_block: int = 0  # fsdp: a block's weights and gradients while it computes
    gathered_blocks: int = 0  # Bytes of all blocks gathered this way
    renewed: int = 0  # Allocated by each step for communication, then freed
    moved: int = 0  # From the process's own memory to shared memory (CPU)


class Case:
    """A rank's share of a step under one strategy, on one stage of the layout."""

    def __init__(self, work: Workload, split: Split, stage: int = 0) -> None:
        model, layout = work.model, split.layout
        parameters = _parameters(model, layout, stage)
        self.work, self.split, self.stage = work, split, stage
        blocks = {name.split(".")[1] for name in parameters if name.startswith("blocks.")}
        self.blocks = len(blocks)
        in_blocks = sum(n for name, n in parameters.items() if name.startswith("blocks."))
        self.block_params = in_blocks // max(self.blocks, 1)  # Elements of one of them
        self.num_params = sum(parameters.values())
        self.root_params = self.num_params - in_blocks
        self.table_params = model.vocab_size * model.n_embd  # Of the embedding, and of the head
        self.is_tied = model.tie_head and EMBEDDING in parameters and layout.pp == 1
        """Whether both are one parameter of this rank."""
        self.leaf = activations(work, self.blocks, layout.tp)
        self.gradient_bytes = FP32 * self.num_params  # S
        self.replicas = layout.dp  # W
        self.leaves = -(-work.num_leaves // self.replicas)  # k, of the rank with the most
        tables = 0 if stage else 2 if self.is_tied else 1
        self.fresh = FP32 * self.table_params * tables
        """The embedding's gradient, the last that backward makes; a tied one comes twice."""
        self.leaves_in_flight = min(self.leaves, layout.pp - stage)
        """Micro-batches whose activations a stage keeps at once (1F1B: arXiv 1806.03377)."""
        recipe = find_strategy(split.strategy).recipe or Recipe()  # DDP's buckets are similar
        size_mb = recipe.bucket_size_mb(work.kind)
        self.buckets = _buckets(tuple(parameters.values()), self.replicas, size_mb)  # Bytes of each

    def shard(self, num_bytes: int) -> int:
        """A rank's share of a value that the replicas divide."""
        return -(-num_bytes // self.replicas)


@cache
def _buckets(sizes: tuple[int, ...], world_size: int, size_mb: float) -> tuple[int, ...]:
    plans = plan_buckets(
        [Item(numel=size, itemsize=FP32, kind=None) for size in sizes],
        range(len(sizes))[::-1],
        bucket_bytes=size_mb * MIB,
        first_bucket_bytes=Recipe().first_bucket_mb * MIB,
        world_size=world_size,
    )
    return tuple(FP32 * plan.numel for plan in plans)


@cache
def most_open_nodes(num_leaves: int, world_size: int) -> int:
    """Largest number of tree nodes that a rank holds at once: `push_leaf` without torch."""
    most = 1
    for rank in range(world_size if num_leaves > world_size else 0):
        leaves = share(num_leaves, rank, world_size)
        for end in range(leaves.start + 1, leaves.stop + 1):
            # A node of 2**k leaves begins at a multiple of it: they grow, then shrink.
            longest = (leaves.start ^ end).bit_length() - 1
            middle = end >> longest << longest
            most = max(most, (middle - leaves.start).bit_count() + (end - middle).bit_count())
    return most


def strategy_memory(case: Case) -> StrategyMemory:
    """The memory of the strategy of `case`; ConfigError for an unknown one."""
    strategy = find_strategy(case.split.strategy)
    recipe = strategy.recipe
    if strategy.needs_group and case.replicas == 1:  # no other replica, see `build_reducer`
        return _other(case, "naive")
    if recipe is None or recipe.shard == "gradients":
        return _other(case, strategy.name)
    return _engine(case, recipe)


def _memory(
    case: Case, loss: MemoryNeed, backward: MemoryNeed, update: MemoryNeed, **other: int
) -> StrategyMemory:
    """Weights and state whole on every rank, unless `other` says otherwise."""
    size = case.gradient_bytes
    whole = {"weights": size, "optimizer": 2 * size, "fresh": case.fresh}
    return StrategyMemory(loss=loss, backward=backward, update=update, **whole | other)


def _engine(case: Case, recipe: Recipe) -> StrategyMemory:
    """Flat buffers that stay from step to step; `.grad` is a view of one. `invariant` has a buffer
    for each open node of its tree."""
    size, bucket = case.gradient_bytes, max(case.buckets)
    other: dict[str, int] = {}
    buffers, passing = 1, 0  # bytes in flight when backward ends
    nodes = 0  # bytes of buffers in addition to the gradients
    if recipe.order == "invariant":
        buffers = most_open_nodes(case.work.num_leaves, case.replicas)
        nodes = (buffers - 1) * size if recipe.node_dtype is None else buffers * size // 2
        if case.work.kind == "cuda":  # CPU ranks of one host read slices in place
            # Incoming slices for the tree's sums: this rank's part of each node of each rank.
            passing = buffers * (case.replicas - 1) * case.shard(bucket)
            passing //= 1 if recipe.node_dtype is None else 2
    elif recipe.reduction in ("ring", "hierarchical"):
        passing = case.shard(bucket)
    elif recipe.wire != "same":  # every bucket's 16-bit copy exists when backward ends
        passing = size // 2
    if case.split.shared_weights and shares_memory(recipe):
        # One copy of weights and state for all ranks of the host: count a rank's share. Gradients
        # lie in shared memory too, and each rank has its own buffers. Moved: the weights, and each
        # buffer except the first.
        passing, other = 0, {"moved": buffers * size}
        other |= {"weights": case.shard(size), "optimizer": case.shard(2 * size)}
    held = _moment(size, nodes)
    moving, update = _moment(size, nodes + passing), held
    other["renewed"] = passing
    if recipe.wire == "fp16":  # two fp32 copies of a bucket when it is scaled back
        update = _moment(size, passing + 2 * bucket)
        other["renewed"] += size
    if recipe.shard == "optimizer":
        update = _moment(size, nodes + _gathering(case))
        other |= {"optimizer": case.shard(2 * size), "renewed": size + case.shard(size)}
    return _memory(case, held, moving, update, **other)


def _gathering(case: Case) -> int:
    """Updated parameters in flight to the other ranks, bucket and own shard: all at once, while the
    next forward runs; on CPUs a few at a time, as on one host."""
    buckets = case.buckets
    in_flight = _IN_FLIGHT if case.work.kind == "cpu" else len(buckets)
    together = max(sum(buckets[n : n + in_flight]) for n in range(len(buckets)))
    return together + case.shard(together)


def _other(case: Case, name: str) -> StrategyMemory:
    """Strategies without flat buffers that stay. `.grad` is allocated by backward and dropped by
    the update; micro-batches before the last add up in it."""
    size, shard = case.gradient_bytes, case.shard(case.gradient_bytes)
    added_up = size if case.leaves > 1 else 0
    # The first micro-batch's embedding gradient does not exist yet when backward ends.
    waits = FP32 * case.table_params if case.fresh and case.leaves == 1 else 0
    made = size - waits
    other: dict[str, int] = {}
    loss, backward, update = _moment(added_up), _moment(made), _moment(size)
    match name:
        case "ddp":
            # Buckets stay; `.grad` is a view of them. Micro-batches before the last add up in
            # separate memory: torch drops the views when gradients are cleared (arXiv 2006.15704).
            loss = backward = _moment(added_up, size)
            update = _moment(0, size)
        case "powersgd":
            # `ddp`, the error (S) and a copy of the current bucket (arXiv 1905.13727).
            moving = 2 * size + max(case.buckets)
            loss, backward = _moment(added_up, 2 * size), _moment(added_up, moving)
            update, other = _moment(0, moving), {"renewed": size}
        case "local_sgd":
            # A flat copy of the weights to synchronise, gradients gone.
            update, other = _moment(0, size), {"renewed": size}
        case "diloco":
            # The round's start and the outer momentum; in synchronisation distances and their mean.
            loss, backward = _moment(added_up, 2 * size), _moment(made, 2 * size)
            update, other = _moment(0, 4 * size), {"renewed": 2 * size}
        case "zero2":
            # Buckets stay whole until backward ends, then only this rank's shards. When the last
            # gradient is made, all other buckets are in flight, each into a shard.
            backward = _moment(size, case.shard(sum(case.buckets[:-1])))
            update = _moment(shard, _gathering(case))
            other = {"optimizer": case.shard(2 * size), "renewed": 2 * (size + shard)}
        case "fsdp":
            # Everything is sharded. Parameters in no block are gathered for the whole step, a block
            # while it computes. Micro-batches before the last keep whole gradients (arXiv
            # 2304.11277).
            root, block = FP32 * case.root_params, FP32 * case.block_params
            loss = _moment(added_up, root)
            # The blocks' gradients are sharded by now, including those of micro-batches before
            # the last.
            # Parameters in no block: weights, gradients, and these again while they are sent.
            backward, update = _moment(shard, 3 * root), _moment(shard)
            other = {"weights": shard, "optimizer": case.shard(2 * size), "fresh": 0}
            other |= {"gathered_block": 2 * block, "gathered_blocks": case.blocks * block}
        case _:
            assert name == "naive", f"no memory is known of {name}"
    return _memory(case, loss, backward, update, **other)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """The sum of closed formulas; the module's docstring has each field's formula and source."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0  # The optimizer's state
    buckets: int = 0  # Copies of gradients for communication; what a strategy gathers
    activations: int = 0  # Kept by forward for backward, at the schedule's peak
    logits: int = 0  # The head's output and the loss's tensors
    workspace: int = 0  # Temporary buffers in addition to these
    slack: int = 0  # Held by the allocator but unused
    process: int = 0  # The interpreter, torch, the CUDA context, communication buffers

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def loose(self) -> int:
        """The part that lives no longer than a micro-batch."""
        return self.activations + self.logits + self.workspace


def _moment(gradients: int, buckets: int = 0) -> MemoryNeed:
    return MemoryNeed(gradients=gradients, buckets=buckets)


def memory_need(work: Workload, split: Split) -> MemoryNeed:
    """The need of the rank that needs most; ConfigError for an unknown strategy, or a model that
    cannot be divided this way."""
    cases = (Case(work, split, stage) for stage in range(split.layout.pp))
    return max(map(_need_of_rank, cases), key=lambda need: need.total)


def _need_of_rank(case: Case) -> MemoryNeed:
    work, split = case.work, case.split
    strategy = strategy_memory(case)
    moments = list(_moments(case, strategy))
    rope = 2 * FP32 * work.model.block_size * work.model.head_dim
    always = {
        "weights": strategy.weights + rope,
        "optimizer": strategy.optimizer,
        "process": CUDA_PROCESS if work.kind == "cuda" else CPU_PROCESS,
    }
    # Holes, see [Note: Slack]: made at a micro-batch's peak, kept until the process ends.
    loose = max(moment.loose for moment in moments)
    shares = (
        (CPU_SLACK, loose),
        (RECOMPUTE_SLACK, case.leaf.recomputed),
        (GATHER_SLACK, strategy.gathered_blocks),
        (RENEW_SLACK, strategy.renewed),
        (MOVE_SLACK, strategy.moved),
    )
    if work.kind == "cuda":
        shares = ((CUDA_SLACK, loose),)
    holes = int(sum(share * size for share, size in shares))
    needs = []
    for moment in moments:
        held = strategy.weights + strategy.optimizer + moment.gradients + moment.buckets
        # Or the model as it was built, if less than that occupies its memory now.
        built = case.gradient_bytes - moment.loose - (0 if split.shared_weights else held)
        needs.append(replace(moment, slack=max(holes, built), **always))
    return max(needs, key=lambda need: need.total)


def _moments(case: Case, strategy: StrategyMemory) -> Iterator[MemoryNeed]:
    """Gradients, buckets and all that lives no longer than a micro-batch, at each moment."""
    work, leaf, flying = case.work, case.leaf, case.leaves_in_flight
    stages = case.split.layout.pp
    is_last = case.stage == stages - 1
    kept = flying * leaf.kept
    if stages > 1:  # a stage's output; its input is its first block's input
        kept += flying * leaf.stream
    head_waits = FP32 * case.table_params if case.is_tied else 0
    block = FP32 * case.block_params + 2 * leaf.stream + strategy.gathered_block
    loss = strategy.loss
    yield replace(loss, activations=kept + leaf.recomputed, workspace=block + head_waits)
    yield replace(strategy.backward, activations=leaf.stream, workspace=strategy.fresh)
    # A tied embedding at both ends of a pipeline: the other end's gradient.
    is_end = stages > 1 and (case.stage == 0 or is_last)
    other_end = FP32 * case.table_params if work.model.tie_head and is_end else 0
    yield replace(strategy.update, workspace=other_end)
    if is_last:
        # The loss keeps this for each micro-batch that waits for its backward.
        of_others = (flying - 1) * FP32 * work.leaf_tokens * work.model.vocab_size
        activations = kept + flying * leaf.last_norm
        for own, workspace in _head(case):
            logits = own + of_others
            yield replace(loss, activations=activations, logits=logits, workspace=workspace)


def _head(case: Case) -> list[tuple[int, int]]:
    """Logits and workspace at the moments of the loss and of the head's gradient."""
    work, leaf = case.work, case.leaf
    size, vocab, table = leaf.element, work.model.vocab_size, FP32 * case.table_params
    copy = 0 if size == FP32 else size * case.table_params
    logits = work.leaf_tokens * vocab
    # Autocast keeps its copies of weights until forward ends, whether or not blocks keep them.
    cached = case.blocks * leaf.weight_copies if work.activation_checkpointing else 0
    forward = 2 * FP32 + (size if copy else 0)
    return [
        (forward * logits, copy + cached),
        (3 * FP32 * logits, copy),
        (size * logits, 2 * copy + table),
    ]
