"""Observability: structured logs, the metric registry, experiment tracking."""
