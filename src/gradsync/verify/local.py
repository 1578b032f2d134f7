"""Judging strategies whose ranks step alone: each against its own leaves; then the meetings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.verify.evidence import Evidence, exact_of
from gradsync.verify.finding import Finding, Kind, finding_from_json, finding_to_json
from gradsync.verify.gather import gather_tensors
from gradsync.verify.judge import Verdict, judge
from gradsync.verify.meeting import Meetings
from gradsync.verify.trace import digest


def judge_local(
    evidence: Evidence, comm: Communicator, strategy: str, options: Mapping[str, Any]
) -> Verdict:
    """Every rank checks its own gradients and updates; the meetings are checked with all weights.

    All ranks call it; the verdict is the same everywhere.
    """
    own = judge(evidence)
    told = all_gather_json(comm, [finding_to_json(finding) for finding in own.findings])
    parts = all_gather_json(comm, own.part_of_bound)
    losses = all_gather_json(comm, _losses(evidence))
    findings = [finding_from_json(finding) for findings in told for finding in findings]
    findings += _meetings(evidence, comm, strategy, options)
    findings += _loss_findings(evidence, losses)
    first = min((finding.step for finding in findings), default=0)
    return Verdict([finding for finding in findings if finding.step == first], max(parts))


def _losses(evidence: Evidence) -> list[tuple[float, float, float]]:
    """Per step this rank's (loss sum, targets, largest error of that sum)."""
    found = []
    for place in range(len(evidence.trace.steps)):
        exact = exact_of(evidence, place)
        weight = exact.weight
        found.append((exact.loss * weight, weight, exact.loss_bound * weight) if weight else _NONE)
    return found


_NONE = (0.0, 0.0, 0.0)


def _loss_findings(evidence: Evidence, losses: list[list[list[float]]]) -> list[Finding]:
    findings = []
    for place, step in enumerate(evidence.trace.steps):
        sums = [rank[place] for rank in losses]
        total, weight = sum(s[0] for s in sums), sum(s[1] for s in sums)
        # The ranks' sums are added once more: W roundings of fp64, far inside of 2^-40.
        bound = (sum(s[2] for s in sums) + 2.0**-40 * sum(abs(s[0]) for s in sums)) / weight
        if abs(step.loss - total / weight) > bound or step.weight != weight:
            detail = f"{step.loss:.9g}, expected {total / weight:.9g}"
            findings.append(Finding(kind=Kind.LOSS, step=step.number, detail=detail))
    return findings


def _meetings(
    evidence: Evidence, comm: Communicator, strategy: str, options: Mapping[str, Any]
) -> list[Finding]:
    meetings = Meetings(strategy, options, evidence.trace, evidence.start)
    findings = []
    for place, step in enumerate(evidence.trace.steps):
        documents = [rank[place] for rank in evidence.ranks]
        if not meetings.meets_at(place):
            continue
        # A rank without leaves stood still.
        own = step.updated or step.before
        weights = gather_tensors(comm, {name: own[name] for name in evidence.trace.trainable})
        if found := meetings.check(place, weights):
            findings.append(found)
        wanted = {name: digest(step.after[name]) for name in step.after}
        for rank, document in enumerate(documents):
            wrong = tuple(name for name in wanted if document["after"][name] != wanted[name])
            if wrong:
                findings.append(
                    Finding(kind=Kind.REPLICAS, step=step.number, names=wrong, ranks=(rank,))
                )
    return findings
