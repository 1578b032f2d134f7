"""Machines, a training run's memory and time, and the split that fits: `gradsync plan`."""
