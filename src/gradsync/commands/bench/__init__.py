"""Benchmarks of synchronisation against hardware limits and other libraries, run in rounds."""
