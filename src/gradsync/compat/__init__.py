"""Names that readers of other guides know, as thin wrappers of the same parts."""
