"""What a rank needs at its fullest moment, by closed formulas."""
