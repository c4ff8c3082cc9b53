"""Training: the same command on a laptop and, under torchrun, on many processes."""
