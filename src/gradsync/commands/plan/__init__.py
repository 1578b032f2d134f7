"""Machines, memory and time of a training run, and the split that fits: `gradsync plan`."""
