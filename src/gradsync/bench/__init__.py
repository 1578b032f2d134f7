"""Measurements: what synchronisation costs, beside its limits and its peers, in interleaved rounds."""
