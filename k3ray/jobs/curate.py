"""Curation on Ray Data: files -> clean -> exact dedup -> tokenizer -> packed shards + manifest.

Two streaming chains of pure rules with one global decision between them (which duplicates go, what
the tokenizer learns from). A part is one block and one task; texts pass through a part at a time
and go from chain to chain over files, so memory stays bounded and the result depends neither on
the number of workers nor on their timing. Entry point: `run_curate`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from k3ray.config.jobs import CurateConfig
from k3ray.curate.chain import document_rules
from k3ray.curate.dataset import (
    TOKENIZER_FILE,
    config_identity,
    exclusive_folder,
    existing_dataset,
    finish_dataset,
    inputs_identity,
)
from k3ray.curate.documents import DOCUMENTS, Rule, documents_of, living
from k3ray.curate.pack_part import PackAndWrite
from k3ray.curate.parts import Part, make_parts, select_files
from k3ray.curate.report import DocumentFact, funnel, split_totals, unigram_baselines
from k3ray.curate.rule_dedup import DropDuplicates, find_duplicates
from k3ray.curate.rule_tokenise import Tokenise
from k3ray.curate.sample import Candidate, choose_sample
from k3ray.curate.sources import Listing, list_sources
from k3ray.curate.storage import file_sha256, read_arrow, write_arrow
from k3ray.errors import DataError, K3RayError
from k3ray.jobs.progress import Progress, Say
from k3ray.model.packed_data import HELDOUT, TRAIN
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.train_bpe import train_bpe

_CPUS_PER_TASK = 1
_BYTES_PER_TOKEN_AT_LEAST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CurateResult:
    """The finished data set; `reused` when it was there already."""

    out_dir: str
    manifest: dict[str, Any]
    reused: bool


def run_curate(config: CurateConfig, *, say: Say) -> CurateResult:
    """Curate into `config.out_dir`. Ray must be initialised.

    Args:
        config: What to curate; `num_workers` bounds the tasks that run at the same time.
        say: Prints a line of progress, at least every few seconds.

    Raises:
        DataError: no input, too little of it, a full disk, a data set of another configuration.
        ConfigError: the vocabulary is too small.
    """
    config = config.model_validate(
        {**config.model_dump(), "out_dir": str(Path(config.out_dir).absolute())}
    )
    found = existing_dataset(config)
    if found is not None:
        say(f"{config.out_dir} already holds this data set ({found['digest'][:12]}), reused")
        return CurateResult(out_dir=config.out_dir, manifest=found, reused=True)
    progress = Progress(say)
    ray.data.DataContext.get_current().enable_progress_bars = False  # we report ourselves
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with exclusive_folder(Path(config.out_dir), input_bytes=config.max_total_bytes) as work:
        manifest = _Curation(config, work, progress).run()
    return CurateResult(out_dir=config.out_dir, manifest=manifest, reused=False)


class _Curation:
    """One run; every method is one stage."""

    def __init__(self, config: CurateConfig, work: Path, progress: Progress) -> None:
        self._config = config
        self._work = work
        self._progress = progress
        self._num_tasks = 1

    def run(self) -> dict[str, Any]:
        listing, parts = self._list()
        self._num_tasks = min(self._config.num_workers, len(parts))
        facts = self._clean(parts)
        duplicates = find_duplicates(
            (fact.document, fact.fingerprint) for fact in facts if fact.fingerprint
        )
        facts = [
            replace(fact, reason="duplicate") if fact.document in duplicates else fact
            for fact in facts
        ]
        tokenizer = self._train_tokenizer(facts)
        rows = self._pack(parts, duplicates, tokenizer)
        return self._finish(listing, facts, tokenizer, rows)

    def _list(self) -> tuple[Listing, list[Part]]:
        config = self._config
        with self._progress.stage("list"):
            listing = list_sources(config.sources, config.extensions)
            chosen = select_files(
                listing.files, seed=config.seed, max_total_bytes=config.max_total_bytes
            )
            parts = make_parts(
                chosen, seed=config.seed, heldout_fraction=config.heldout_fraction,
                part_bytes=_BYTES_PER_TOKEN_AT_LEAST
                * config.shard_sequences * config.sequence_length,
            )  # fmt: skip
        return listing, parts

    def _clean(self, parts: Sequence[Part]) -> list[DocumentFact]:
        """First chain: read, clean, filter, fingerprint; living texts go to the work folder."""
        tables = [
            pa.Table.from_batches([documents_of(part.files, part=part.index, split=part.split)])
            for part in parts
        ]
        documents = ray.data.from_arrow(tables)
        for rule in document_rules(self._config):
            documents = self._map(documents, _apply_rule, rule=rule)
        documents = self._map(documents, _spill, folder=str(self._work / "clean"))
        sizes = {file.document: file.size_bytes for part in parts for file in part.files}
        facts: list[DocumentFact] = []
        with self._progress.stage("read and clean", total=len(parts), unit="parts") as stage:
            for table in _streamed(documents):
                facts += [
                    DocumentFact(size_bytes=sizes[row["document"]], **row)
                    for row in table.to_pylist()
                ]
                stage.done = len({fact.part for fact in facts})
        if len(facts) != len(sizes):
            raise DataError(
                f"{len(sizes)} documents went in, {len(facts)} came out",
                remedy="run the curation again",
            )
        return sorted(facts, key=lambda fact: fact.document)

    def _train_tokenizer(self, facts: Sequence[DocumentFact]) -> K3Tokenizer:
        candidates = (
            Candidate(
                document=fact.document, package=fact.package, part=fact.part,
                text_bytes=fact.text_bytes,
            )
            for fact in facts
            if fact.split == TRAIN and fact.reason is None
        )  # fmt: skip
        with self._progress.stage("train tokenizer"):
            sample = choose_sample(
                candidates, seed=self._config.seed, max_bytes=self._config.tokenizer_sample_bytes
            )
            if not sample:
                raise DataError(
                    "no training document is left after the filters",
                    remedy="add sources or loosen the filters",
                )
            tokenizer = train_bpe(self._texts(sample), vocab_size=self._config.vocab_size)
            tokenizer.save(self._work / TOKENIZER_FILE)
        return tokenizer

    def _texts(self, sample: Sequence[Candidate]) -> Iterator[str]:
        wanted = {item.document for item in sample}
        for part in sorted({item.part for item in sample}):
            batch = read_arrow(_part_file(str(self._work / "clean"), part))
            for document, text in zip(
                batch.column("document").to_pylist(), batch.column("text").to_pylist(), strict=True
            ):
                if document in wanted:
                    yield text

    def _pack(
        self, parts: Sequence[Part], duplicates: frozenset[str], tokenizer: K3Tokenizer
    ) -> list[dict[str, Any]]:
        """Second chain: drop duplicates, tokenise, pack, write one shard per part."""
        config = self._config
        schema = pa.schema({"part": pa.int32(), "split": pa.string()})
        documents = ray.data.from_arrow([
            pa.Table.from_pylist([{"part": part.index, "split": part.split}], schema=schema)
            for part in parts
        ])  # fmt: skip
        write = PackAndWrite(
            folder=str(self._work / "packed"),
            sequence_length=config.sequence_length,
            vocab_size=config.vocab_size,
        )
        documents = self._map(
            documents, _pack_part, folder=str(self._work / "clean"), write=write,
            rules=(DropDuplicates(documents=duplicates), Tokenise(tokenizer=tokenizer)),
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        with self._progress.stage("tokenise and pack", total=len(parts), unit="parts") as stage:
            for table in _streamed(documents):
                rows += table.to_pylist()
                stage.done = len(rows)
        return rows

    def _finish(
        self,
        listing: Listing,
        facts: Sequence[DocumentFact],
        tokenizer: K3Tokenizer,
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        report = {
            "config_digest": config_identity(self._config),
            "funnel": funnel(facts, num_listed=len(listing.files)),
            "splits": {split: split_totals(rows, split) for split in (TRAIN, HELDOUT)},
            "heldout_packages": sorted({f.package for f in facts if f.split == HELDOUT}),
            "heldout_bits_per_byte": unigram_baselines(rows),
            "unreadable_folders": listing.unreadable,
            "seconds": self._progress.seconds,
            "num_workers": self._config.num_workers,
        }
        with self._progress.stage("write manifest"):
            return finish_dataset(
                self._work,
                self._config,
                rows=rows,
                tokenizer={
                    "file": TOKENIZER_FILE,
                    "sha256": file_sha256(self._work / TOKENIZER_FILE),
                    "vocab_size": tokenizer.vocab_size,
                    "num_text_tokens": tokenizer.num_text_tokens,
                },
                inputs={"num_documents": len(facts), "sha256": inputs_identity(facts)},
                report=report,
            )

    def _map(self, dataset: Any, step: Any, **arguments: Any) -> Any:
        return dataset.map_batches(
            step, fn_kwargs=arguments, batch_size=None, batch_format="pyarrow",
            num_cpus=_CPUS_PER_TASK,
            compute=ray.data.TaskPoolStrategy(size=self._num_tasks),
        )  # fmt: skip


def _streamed(dataset: Any) -> Iterator[pa.Table]:
    """Blocks as they are finished, in any order; a task's typed error is raised as itself."""
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    except ray.exceptions.RayError as error:
        raise _typed(error) from error


def _typed(error: BaseException) -> K3RayError:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, K3RayError):
            return type(seen)(seen.message, remedy=seen.remedy, **seen.fields)
        seen = getattr(seen, "cause", None) or seen.__cause__
    return DataError(f"a curation task failed: {error}", remedy="see the message; then run again")


def _batch(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0].cast(schema) if batches else schema.empty_table().to_batches()[0]


def _apply_rule(table: pa.Table, *, rule: Rule) -> pa.Table:
    return pa.Table.from_batches([rule(_batch(table, DOCUMENTS))])


def _part_file(folder: str, part: int) -> Path:
    return Path(folder) / f"part-{part:05d}.arrow"


def _spill(table: pa.Table, *, folder: str) -> pa.Table:
    """Write each part's living documents and pass only the facts on."""
    batch = _batch(table, DOCUMENTS)
    for part in set(batch.column("part").to_pylist()):
        mine = batch.filter(pa.compute.equal(batch.column("part"), part))
        write_arrow(_part_file(folder, part), living(mine))
    lengths = pa.compute.binary_length(batch.column("text").cast(pa.large_binary()))
    facts = batch.select(["document", "package", "split", "part", "reason", "fingerprint"])
    return pa.Table.from_batches([
        facts.append_column(
            pa.field("text_bytes", pa.int64()), pa.compute.fill_null(lengths.cast(pa.int64()), 0)
        )
    ])  # fmt: skip


def _pack_part(
    table: pa.Table, *, folder: str, rules: tuple[Rule, ...], write: PackAndWrite
) -> pa.Table:
    written = []
    for row in table.to_pylist():
        batch = read_arrow(_part_file(folder, row["part"]))
        for rule in rules:
            batch = rule(batch)
        written.append(write(batch, part=row["part"], split=row["split"]))
    return pa.Table.from_batches(written)
