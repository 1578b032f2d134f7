"""A rank's memory at its fullest moment, by closed formulas."""
