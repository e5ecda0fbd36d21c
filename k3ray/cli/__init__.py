"""The `k3ray` command and the quickstart."""
