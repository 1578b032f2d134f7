"""Measurements: what synchronisation costs beside its limits and its peers, in rounds."""
