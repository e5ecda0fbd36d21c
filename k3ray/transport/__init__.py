"""Tensors between processes: contract in `protocol`, ZeroMQ and in-process implementations."""
