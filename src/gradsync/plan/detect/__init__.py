"""The machine to train on, asked of drivers and kernel."""
