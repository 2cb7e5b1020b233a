"""Faster ways to compute the same training step. `choose` picks all of them by rule but fp8, which rounds."""
