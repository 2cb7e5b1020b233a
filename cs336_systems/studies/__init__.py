"""Measurements beside the training step: attention alone, the effect of fusion, hardware
ceilings, precision.
"""
