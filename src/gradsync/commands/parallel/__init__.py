"""Models that are split over ranks: pipeline stages, tensor shards, and data-parallel groups."""
