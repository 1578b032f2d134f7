"""What a step takes: a leaf measured or estimated, messages by formula or by fitted lines."""
