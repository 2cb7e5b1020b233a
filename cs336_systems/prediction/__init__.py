"""Memory of a training step foretold: its tensors one by one, and the allocator that places them. No torch."""
