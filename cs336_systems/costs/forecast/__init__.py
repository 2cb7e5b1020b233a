"""Forecast of a training step's memory: its tensors one by one, and the allocator that places them."""
