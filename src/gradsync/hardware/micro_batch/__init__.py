"""Which micro-batch runs, by trying; agreed among ranks."""
