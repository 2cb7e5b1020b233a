"""Costs on paper: FLOPs, bytes, hardware peaks and the forecast of memory. Nothing here imports
torch.
"""
