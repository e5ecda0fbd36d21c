"""Tensor operations of the model: shapes are checked here once, arithmetic is written down here."""
