"""One sentence per cause: what, where, why, and what to do."""

from __future__ import annotations

from gradsync.verify.finding import Cause, Finding, Kind, listed, ranks_text

_WHAT = {
    Kind.START: "the weights are not the one-rank run's",
    Kind.DATA: "the global batch is not the one-rank run's",
    Kind.RANDOM: "dropout is not the one-rank run's",
    Kind.FINITE: "a number is not finite on one rank either",
    Kind.FORWARD: "the forward is not reproducible",
    Kind.MOVED: "weights changed during backward",
    Kind.GRADIENT_REPLICAS: "the gradient differs between ranks",
    Kind.GRADIENT: "the gradient is not the one-rank run's",
    Kind.NORM: "the gradient norm is not the one-rank run's",
    Kind.LOSS: "the mean loss is not the one-rank run's",
    Kind.UPDATE: "the optimizer's step is not the one-rank run's",
    Kind.REPLICAS: "the weights differ between ranks",
    Kind.MEETING: "the weights are not what the ranks' meeting must give",
    Kind.BUFFERS: "buffers are not the one-rank run's",
    Kind.BITS: "the bits are not the one-rank run's",
    Kind.FALL: "the loss does not fall",
}

_REMEDY = {
    Cause.DATA: "give each sample of a global batch to exactly one rank (gs.loader does)",
    Cause.INITIAL_WEIGHTS: "broadcast rank 0's weights before the first step (gs.replicate does)",
    Cause.LOSS_SCALING: "sum losses over targets and divide once, by the global number of targets",
    Cause.UNSYNCHRONISED: "let every rank reduce every gradient in every step, in the same order",
    Cause.FLAG_TOO_LATE: "enter micro_step or no_sync before the forward, not before the backward",
    Cause.BATCH_NORM: "choose batch_norm=freeze, or use GroupNorm",
    Cause.RANDOM: "seed by (seed, step, leaf) before each forward, never by rank",
    Cause.DTYPE: "keep gradients in the weights' dtype, or choose a strategy that says it rounds",
    Cause.ORDER: "all is right up to rounding; sums are taken in another order at this world size",
    Cause.OPTIMIZER: "the optimizer must act elementwise on the whole mean gradient",
    Cause.UNKNOWN: "none of the known causes explains it; compare the first parameter by hand",
}


_REMEDY_FOR = {
    Kind.FINITE: "look for its first inf or nan on one rank: no strategy can help",
    Kind.FORWARD: "let it depend on inputs, weights, buffers and torch's generator alone",
    Kind.REPLICAS: "let nothing but the optimizer write to weights, alike on all ranks",
    Kind.MEETING: "average the weights of all ranks, with equal shares",
    Kind.BUFFERS: "leave buffers to gs.replicate, which moves them by what all leaves do",
    Kind.MOVED: "reduce parameter.grad in the hook, and leave the parameter alone",
}


def sentence(cause: Cause, finding: Finding, detail: str) -> str:
    """`step 2, 'head.weight', rank 1: what; cause: why. What to do.`"""
    where = [f"step {finding.step}"]
    if finding.names:
        where.append(listed(finding.names))
    if finding.ranks:
        where.append(ranks_text(finding.ranks))
    remedy = _REMEDY[cause]
    named = finding.kind in (Kind.FINITE, Kind.FORWARD)
    if named or cause in (Cause.UNSYNCHRONISED, Cause.BATCH_NORM):
        remedy = _REMEDY_FOR.get(finding.kind, remedy)
    why = f"{cause.value}: {detail}" if detail else cause.value
    return f"{', '.join(where)}: {_WHAT[finding.kind]}; {why}. {remedy[0].upper()}{remedy[1:]}."
