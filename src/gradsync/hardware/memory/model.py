"""How many bytes a rank needs to train, by closed formulas; pure, no torch.

    persistent   weights, optimizer state, buckets          strategy_memory.py
    a leaf       activations, logits                        activation_memory.py, here
    beside       workspace, slack, process                  here

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

from dataclasses import dataclass, replace

from gradsync.hardware.memory.activations import FP32, Activations, compute_bytes
from gradsync.hardware.memory.need import MemoryNeed
from gradsync.hardware.memory.rank_shape import RankShape, rank_shape
from gradsync.hardware.memory.strategies import Case, Moment, StrategyMemory, strategy_memory
from gradsync.hardware.workload import Split, Workload
from gradsync.parallel.layout import Layout

MIB = 2**20
CPU_PROCESS = 333 * MIB
"""Python, torch and gradsync after a step of a model of no size; measured, torch 2.13, x86-64."""
CUDA_PROCESS = 1024 * MIB
"""CUDA context, kernels, cuBLAS workspace and NCCL's buffers; a default."""
CPU_SLACK, RECOMPUTE_SLACK, GATHER_SLACK, RENEW_SLACK, MOVE_SLACK = 0.45, 2.0, 3.0, 0.2, 0.4
CUDA_SLACK = 0.1
"""See [Note: Slack]."""


def memory_need(work: Workload, split: Split) -> MemoryNeed:
    """What the rank needs that needs most.

    A step's peak; writing a checkpoint may take more, see `checkpoint_bytes`.

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


def checkpoint_bytes(work: Workload, split: Split) -> int:
    """What rank 0 needs while `gradsync train` writes a checkpoint; other ranks need less.

    Under `zero1`, `zero2` and `fsdp` the others' shares come to it tensor by tensor, into its RAM:
    two at a time, of which none is larger than the embedding, nor both than a share. Other
    strategies have all of it as it is. Of whole replicas, not of stages and shards.

    Raises:
        ConfigError: an unknown strategy.
    """
    shape = rank_shape(work.model, Layout(), 0)
    case = Case(work, split, shape)
    strategy = strategy_memory(case)
    shares = split.strategy in ("zero1", "zero2", "fsdp") and split.layout.dp > 1
    arrives = 0
    if shares and work.kind == "cpu":  # on CUDA not in the device's memory
        share = strategy.optimizer + (strategy.weights if split.strategy == "fsdp" else 0)
        arrives = min(share, 2 * FP32 * shape.table_params)
    buffers = strategy.loss.buckets + strategy.loss.gradients if split.strategy == "zero1" else 0
    held = strategy.weights + strategy.optimizer + buffers
    return held + arrives + process_bytes(work)


def process_bytes(work: Workload) -> int:
    """Of a process without a model."""
    return CUDA_PROCESS if work.kind == "cuda" else CPU_PROCESS


@dataclass(frozen=True, kw_only=True, slots=True)
class _Together:
    """What is in memory at one moment beside weights, optimizer state and process."""

    moment: Moment
    """What the strategy has."""
    activations: int = 0
    """As in `MemoryNeed`, and so the rest."""
    logits: int = 0
    workspace: int = 0
    slack: int = 0

    @property
    def loose(self) -> int:
        """What lives no longer than a leaf."""
        return self.activations + self.logits + self.workspace + self.moment.fresh

    @property
    def total(self) -> int:
        return self.moment.gradients + self.moment.buckets + self.loose + self.slack


def _of_stage(work: Workload, split: Split, shape: RankShape) -> MemoryNeed:
    case = Case(work, split, shape)
    strategy = strategy_memory(case)
    moments = _moments(case, strategy)
    fragments = _fragments(case, strategy, max(each.loose for each in moments))
    fullest = max(
        (replace(each, slack=_slack(case, strategy, each, fragments)) for each in moments),
        key=lambda each: each.total,
    )
    rope = 2 * FP32 * work.model.block_size * work.model.head_dim
    return MemoryNeed(
        weights=strategy.weights + rope,
        gradients=fullest.moment.gradients,
        optimizer=strategy.optimizer,
        buckets=fullest.moment.buckets,
        activations=fullest.activations,
        logits=fullest.logits,
        workspace=fullest.workspace + fullest.moment.fresh,
        slack=fullest.slack,
        process=process_bytes(work),
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


def _slack(case: Case, strategy: StrategyMemory, moment: _Together, fragments: int) -> int:
    """Fragments; or the model as it was built, where less than that lies in its place now."""
    held = 0
    if not case.split.shared_weights:
        held = strategy.weights + strategy.optimizer
        held += moment.moment.gradients + moment.moment.buckets
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


def _moments(case: Case, strategy: StrategyMemory) -> list[_Together]:
    work, shape = case.work, case.shape
    leaf = Activations(work, shape.blocks, shape.layout.tp)
    flying = leaves_in_flight(case)
    kept = flying * leaf.kept
    if shape.layout.pp > 1:  # what a stage gives; what it got is its first block's input
        kept += flying * leaf.stream
    head_waits = FP32 * shape.table_params if shape.is_tied else 0
    block = FP32 * shape.block_params + 2 * leaf.stream + strategy.gathered_block
    found = [
        _Together(
            moment=strategy.loss,
            activations=kept + leaf.recomputed,
            workspace=block + head_waits,
        ),
        _Together(moment=strategy.backward, activations=leaf.stream),
        _Together(moment=strategy.update, workspace=_of_other_end(work, shape)),
    ]
    if not shape.has_head:
        return found
    of_others = (flying - 1) * _kept_by_loss(work, shape)
    return found + [
        _Together(
            moment=strategy.loss,
            activations=kept + flying * leaf.last_norm,
            logits=logits + of_others,
            workspace=workspace,
        )
        for logits, workspace in _head(work, shape)
    ]


def _of_other_end(work: Workload, shape: RankShape) -> int:
    """A tied embedding on both ends of a pipeline: the other end's gradient."""
    is_end = shape.layout.pp > 1 and (shape.has_embedding or shape.has_head)
    return FP32 * shape.table_params if work.model.tie_head and is_end else 0


def _kept_by_loss(work: Workload, shape: RankShape) -> int:
    """Of a leaf that waits for its backward."""
    if work.loss_rows is not None:
        return FP32 * shape.table_params
    return FP32 * work.leaf_tokens * work.model.vocab_size


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
