"""Kernels of a step: which phase, module and class they belong to, and when the device waited."""
