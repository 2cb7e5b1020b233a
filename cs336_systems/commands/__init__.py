"""What can be typed: one module per command, its flags and what it does. None imports torch
before it must.
"""
