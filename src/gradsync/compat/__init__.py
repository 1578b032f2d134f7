"""Names that readers of other guides know, as thin faces over the same parts."""
