"""Explains memory snapshots: what each block of memory held, and from when to when."""
