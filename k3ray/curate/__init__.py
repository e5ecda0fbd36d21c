"""Curation rules, pure: `RecordBatch -> RecordBatch`, one rule per file. No Ray here.

Reading order: `documents` (the batch), `chain` (the rules in order), the `rule_*` files, then
`dedup`, `sample`, `manifest`. `k3ray.jobs.curate` runs them on Ray Data.
"""
