"""Data: index maths, token files, preparation and loaders.

The order of samples is a pure function of (seed, epoch, position). A step is a slice of that
stream; a rank takes its contiguous micro-batches of the step. So the state of a loader is a few
integers, equal on all ranks, and a run can resume with another world size.
"""
