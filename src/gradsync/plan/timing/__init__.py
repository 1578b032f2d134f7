"""The time of a step: a leaf measured or estimated, messages by formula or by fitted lines."""
