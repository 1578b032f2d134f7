"""How many bytes a rank needs to train, by closed formulas; pure, no torch.

    persistent   weights, optimizer state, buckets     strategies.py
    a leaf       activations, logits                   activations.py, here
    beside       workspace, slack, process             here

A step has a few moments at which memory can be fullest; the need is that of the fullest one, on
the pipeline stage that needs most. N tokens of a leaf, V vocabulary, C width, e bytes of an element
where products are computed (2 under autocast, 4 in fp32):

    loss       blocks' activations, last norm, and for the head
               whole: 12 N V (logarithms of probabilities, the gradients of these and of logits)
               in R rows: 4 V C (gradient of the head) + (8 + 4 e) R V
    head       activations, e N V (gradient of the logits), (e + e + 4) V C (the head's 16-bit copy,
               its gradient in 16 bits and in fp32)
    block      activations, one block's own gradients, what checkpointing recomputes
    backward   all gradients, and the embedding's once more (two when it is tied: the head's waits
               until the embedding's comes)
    update     all gradients, optimizer; what the strategy gathers

The same moments for every strategy; what each has then stands in `memory/strategies.py`.

[Note: Shared pages] With `Split.shared_weights` (and for gradients in shared memory) a rank counts
its share: what all ranks of the host map, divided by them, so that ranks add up to what the host
needs. The kernel's RSS counts such pages in every rank that has touched them, PSS (proportional set
size, proc(5) smaps) counts them as here.

[Note: Slack] On a CPU, what glibc's heap holds without using it, with `keep_freed_memory`. Torch
asks for blocks aligned to 64 bytes, and glibc before 2.38 cannot put such a block into a hole of
just its size (bug 14581): so temporaries leave holes between what stays, and whatever goes through
memory of the process leaves some of its place unused:

    CPU_SLACK        of what a leaf takes
    RECOMPUTE_SLACK  of a block that checkpointing computes twice
    GATHER_SLACK     of the blocks under `fsdp`: each is gathered twice and its gradient sent once
    RENEW_SLACK      of buckets, copies and gathered weights that a step makes anew
    MOVE_SLACK       of what was built here and then moved into shared memory

Measured with `gradsync bench memory`: peaks with `keep_freed_memory` less what the formulas count
(which is what --exact measures, where every block is mapped by itself), over 16 strategies at two
sizes (benchmarks/memory); one number each, chosen there for all cases together. And the heap never
shrinks below the model as it was built.

On CUDA, what torch's caching allocator reserves beyond what is allocated (CUDA_SLACK): a default,
not measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from gradsync.plan.memory.activations import (
    FP32,
    Activations,
    RankShape,
    compute_bytes,
    rank_shape,
)
from gradsync.plan.memory.strategies import Case, StrategyMemory, strategy_memory
from gradsync.plan.workload import Split, Workload

MIB = 2**20
CPU_PROCESS = 333 * MIB
"""Python, torch and gradsync after a step of a model of no size; measured, torch 2.13, x86-64."""
CUDA_PROCESS = 1024 * MIB
"""CUDA context, kernels, cuBLAS workspace and NCCL's buffers; a default."""
CPU_SLACK, RECOMPUTE_SLACK, GATHER_SLACK, RENEW_SLACK, MOVE_SLACK = 0.45, 2.0, 3.0, 0.2, 0.4
CUDA_SLACK = 0.1
"""See [Note: Slack]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """The sum of closed formulas; each field's formula and source stand in `memory/model.py`."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's state."""
    buckets: int = 0
    """Copies of gradients made for communication, gathered blocks and windows of a strategy."""
    activations: int = 0
    """Kept by forward for backward, at the fullest moment of the schedule."""
    logits: int = 0
    """The head's output and what the loss makes of it."""
    workspace: int = 0
    """Temporary buffers beside these."""
    slack: int = 0
    """Held by the allocator without use."""
    process: int = 0
    """The interpreter, torch, the CUDA context, communication buffers."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def loose(self) -> int:
        """The part that lives no longer than a leaf."""
        return self.activations + self.logits + self.workspace


def memory_need(work: Workload, split: Split) -> MemoryNeed:
    """The need of the rank that needs most.

    Args:
        work: what is trained.
        split: how it is divided.

    Raises:
        ConfigError: an unknown strategy, or a model that cannot be divided so.
    """
    stages = (
        _of_stage(work, split, rank_shape(work.model, split.layout, stage))
        for stage in range(split.layout.pp)
    )
    return max(stages, key=lambda need: need.total)


def _of_stage(work: Workload, split: Split, shape: RankShape) -> MemoryNeed:
    case = Case(work, split, shape)
    strategy = strategy_memory(case)
    moments = list(_moments(case, strategy))
    fragments = _fragments(case, strategy, max(each.loose for each in moments))
    rope = 2 * FP32 * work.model.block_size * work.model.head_dim
    always = {
        "weights": strategy.weights + rope,
        "optimizer": strategy.optimizer,
        "process": CUDA_PROCESS if work.kind == "cuda" else CPU_PROCESS,
    }
    return max(
        (
            replace(each, slack=_slack(case, strategy, each, fragments), **always)
            for each in moments
        ),
        key=lambda need: need.total,
    )


def _fragments(case: Case, strategy: StrategyMemory, loose: int) -> int:
    """Holes, see [Note: Slack]: made when a leaf takes most, there until the process ends."""
    work, shape = case.work, case.shape
    if work.kind == "cuda":
        return int(CUDA_SLACK * loose)
    recomputed = Activations(work, shape.blocks, shape.layout.tp).recomputed
    shares = (
        (CPU_SLACK, loose),
        (RECOMPUTE_SLACK, recomputed),
        (GATHER_SLACK, strategy.gathered_blocks),
        (RENEW_SLACK, strategy.renewed),
        (MOVE_SLACK, strategy.moved),
    )
    return int(sum(share * size for share, size in shares))


def _slack(case: Case, strategy: StrategyMemory, moment: MemoryNeed, fragments: int) -> int:
    """Fragments; or the model as it was built, where less than that lies in its place now."""
    held = 0
    if not case.split.shared_weights:
        held = strategy.weights + strategy.optimizer + moment.gradients + moment.buckets
    return max(fragments, case.gradient_bytes - held - moment.loose)


def leaves_in_flight(case: Case) -> int:
    """Leaves whose activations a pipeline stage keeps at once.

    GPipe (Huang et al. 2018, arXiv 1811.06965): all of a replica's. 1F1B (Narayanan et al. 2019 and
    2021, arXiv 1806.03377, 2104.04473): as many as there are stages from here to the last.
    """
    layout = case.split.layout
    if layout.pp == 1:
        return 1
    if case.split.schedule == "gpipe":
        return case.leaves
    return min(case.leaves, layout.pp - case.shape.stage)


def _moments(case: Case, strategy: StrategyMemory) -> Iterator[MemoryNeed]:
    """Gradients, buckets and whatever lives no longer than a leaf, at each moment of a step."""
    work, shape = case.work, case.shape
    leaf = Activations(work, shape.blocks, shape.layout.tp)
    flying = leaves_in_flight(case)
    kept = flying * leaf.kept
    if shape.layout.pp > 1:  # what a stage gives; what it got is its first block's input
        kept += flying * leaf.stream
    head_waits = FP32 * shape.table_params if shape.is_tied else 0
    block = FP32 * shape.block_params + 2 * leaf.stream + strategy.gathered_block
    loss = MemoryNeed(**strategy.loss._asdict())
    yield replace(loss, activations=kept + leaf.recomputed, workspace=block + head_waits)
    backward = MemoryNeed(**strategy.backward._asdict())
    yield replace(backward, activations=leaf.stream, workspace=strategy.fresh)
    # A tied embedding on both ends of a pipeline: the other end's gradient.
    is_end = shape.layout.pp > 1 and (shape.has_embedding or shape.has_head)
    other_end = FP32 * shape.table_params if work.model.tie_head and is_end else 0
    yield MemoryNeed(**strategy.update._asdict(), workspace=other_end)
    if shape.has_head:
        # What the loss keeps of each leaf that waits for its backward.
        in_rows = work.loss_rows is not None
        kept_by_loss = shape.table_params if in_rows else work.leaf_tokens * work.model.vocab_size
        of_others = (flying - 1) * FP32 * kept_by_loss
        activations = kept + flying * leaf.last_norm
        for logits, workspace in _head(work, shape):
            yield replace(
                loss,
                activations=activations,
                logits=logits + of_others,
                workspace=workspace,
            )


def _head(work: Workload, shape: RankShape) -> list[tuple[int, int]]:
    """Logits and workspace at the moments of the loss and of the head's gradient."""
    size = compute_bytes(work)
    table = FP32 * shape.table_params
    vocab = work.model.vocab_size
    copy = 0 if work.dtype == "fp32" else size * shape.table_params
    if work.loss_rows is not None:
        rows = min(work.loss_rows, work.leaf_tokens) * vocab
        stream = FP32 * work.leaf_tokens * work.model.n_embd
        return [
            ((2 * FP32 + 4 * size) * rows, table + 2 * copy + stream),
            (0, 2 * table + 2 * stream),
        ]
    logits = work.leaf_tokens * vocab
    # Autocast keeps its copies of weights until forward is over, whether blocks keep them or not.
    leaf = Activations(work, shape.blocks, shape.layout.tp)
    cached = shape.blocks * leaf.weight_copies if work.activation_checkpointing else 0
    forward = 2 * FP32 + (size if copy else 0)
    return [
        (forward * logits, copy + cached),
        (3 * FP32 * logits, copy),
        (size * logits, 2 * copy + table),
    ]
