"""Which group holds which expert: plans, partitions, and whether a spec fits the cluster."""
