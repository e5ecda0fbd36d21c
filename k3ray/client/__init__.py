"""Clients of the endpoint: `KimiClient`, `AsyncKimiClient`, and the load generator."""
