"""Measurements beside the training step: attention alone, what fusing does, what precision does."""
