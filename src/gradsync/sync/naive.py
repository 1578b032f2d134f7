"""`naive`: one blocking all-reduce for each parameter, after backward. The shortest correct code.

    backward of the last leaf ───────────► all_reduce(p0) ► all_reduce(p1) ► … ► optimizer

It is the readable twin against which every other strategy is checked. Bytes per rank and step:
2(W-1)/W x the gradients (a ring, Patarasuk & Yuan 2009); one operation per parameter; no overlap.
"""

from __future__ import annotations

from gradsync.sync.reducer import Reducer, Reduction, sum_gradients


class NaiveReducer(Reducer):
    """Sums gradients over ranks, parameter by parameter."""

    own_loop = True

    def reduce(self, used: list[bool]) -> Reduction:
        """See `Reducer.reduce`."""
        return sum_gradients(self.parameters, used, self.comm)
