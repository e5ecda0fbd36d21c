"""Continuous batching over a live model: requests in, token events out."""
