"""Ranks that divide the optimizer's work: each keeps the state of some elements and updates them.

                     by messages (zero.py)           in a host's memory (host_step.py)
    a rank owns      a shard of each bucket          whole blocks, one run after another
    the update       elementwise.py: the optimizer itself, on this rank's pieces of parameters
    state            of its pieces, on each rank     of everything, once per host
                     (sharded_optimizer.py)          (host_memory.py)
    publish          gather each bucket              write into the others' replicas

Every element goes through the operations of the whole optimizer, and parameters are cut where no
vector loop ends (layout.py), so the bits are those of the whole optimizer.
"""
