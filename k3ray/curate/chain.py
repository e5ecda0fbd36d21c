"""The rules in order: what happens to a document before the global decisions."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from k3ray.config.jobs import CurateConfig
from k3ray.curate.documents import Rule
from k3ray.curate.rule_clean import CleanText
from k3ray.curate.rule_fingerprint import Fingerprint
from k3ray.curate.rule_generated import DropGenerated
from k3ray.curate.rule_lines import DropUnreadableLines
from k3ray.curate.rule_non_text import DropNonText
from k3ray.curate.rule_read import ReadFiles
from k3ray.curate.rule_short import DropShort


def document_rules(config: CurateConfig) -> tuple[Rule, ...]:
    """Read, clean, filter, fingerprint."""
    return (
        ReadFiles(max_file_bytes=config.max_file_bytes),
        CleanText(),
        DropShort(min_chars=config.min_chars),
        DropUnreadableLines(),
        DropNonText(),
        DropGenerated(),
        Fingerprint(),
    )


def apply_rules(rules: Iterable[Rule], batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rules one after the other on one batch (what Ray Data does block by block)."""
    for rule in rules:
        batch = rule(batch)
    return batch
