"""What the machine is, what a training run needs, and which split fits: `gradsync plan`."""
