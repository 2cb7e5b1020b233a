"""Ceilings of a device as tables and pictures, and the roofline with the parts of a step."""
