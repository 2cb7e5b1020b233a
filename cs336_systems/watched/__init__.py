"""Watches a training loop that exists already: `from cs336 import watch`."""

from .loop import Watched, watch

__all__ = ["Watched", "watch"]
