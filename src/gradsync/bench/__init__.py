"""Measurements: what synchronisation costs, beside its limits and its peers.

Benchmarks sit on top: nothing that trains imports them. Each one measures in interleaved rounds
(every contestant has a turn in each round, so that whatever else the machine does meets all of them
alike), keeps every sample, and says medians with quartiles, never a single number.
"""
