"""Faster ways to compute the training step. `choose` picks most by rule, but not fp8 and bf16
moments: they round.
"""
