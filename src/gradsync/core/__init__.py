ORDER = "_gradsync_order"
"""Attribute of a tensor of a batch: the order of samples that it comes from, in words."""
