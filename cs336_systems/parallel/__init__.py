"""A step on several ranks: gradients averaged in several ways, a sharded optimizer, sharded
parameters.
"""
