"""Triton kernels of K3, a folder per op; each has its plain-PyTorch `reference.py`."""
