"""What there is to train on here, asked of drivers and kernel."""
