"""Ceilings of a few devices that come with the program, as compressed studies; `ship` writes
them.
"""
