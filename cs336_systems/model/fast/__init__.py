"""Faster ways to compute the same training step. `choose` picks most by rule, but never fp8 or bf16 moments."""
