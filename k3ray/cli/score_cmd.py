"""`k3ray score`: log-probabilities of given tokens under a checkpoint; no cluster needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from k3ray.config.numeric import NumericMode
from k3ray.errors import BadRequestError

_NUMBER = re.compile(r"-?[0-9]{1,12}")


def score(
    checkpoint: Annotated[Path, typer.Option(help="folder in the release's layout")],
    token_ids: Annotated[str | None, typer.Option(help="comma-separated token ids")] = None,
    *,
    token_file: Annotated[Path | None, typer.Option(help="file of comma-separated ids")] = None,
    image: Annotated[Path | None, typer.Option(help="refused: images are not computed")] = None,
    logits: Annotated[bool, typer.Option("--logits", help="all logits after every token")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="fast instead of deterministic")] = False,
) -> None:
    """Teacher-forced log-probabilities of token_ids[1:], by the serving path."""
    if image is not None:
        raise BadRequestError(
            f"{image}: the vision tower is stored, not computed yet",
            remedy="score text only", param="image",
        )  # fmt: skip
    tokens = _tokens(token_ids, token_file)
    import torch

    from k3ray.model.scorer import CheckpointScorer

    torch.set_num_threads(1)  # part of the numeric mode
    numeric = NumericMode.FAST if fast else NumericMode.DETERMINISTIC
    document = {
        "token_ids": tokens,
        **_scored(CheckpointScorer(checkpoint, numeric=numeric).rows(tokens), tokens, logits),
        "numeric_mode": str(numeric),
    }
    if as_json:
        typer.echo(json.dumps(document))
        return
    for token, value in zip(tokens[1:], document["logprobs"], strict=True):
        typer.echo(f"{token:>8} {value:.6f}")
    typer.echo(f"most likely next token: {document['next_token']}")


def _scored(pieces: Iterator[Any], tokens: list[int], keep_logits: bool) -> dict[str, Any]:
    """Log-probabilities piece by piece, so that a long text needs no memory for its logits."""
    import numpy as np

    from k3ray.ops.logprobs import token_logprobs

    logprobs: list[float] = []
    kept: list[list[float]] = []
    next_token = 0
    for rows_TV in pieces:
        targets = tokens[len(logprobs) + 1 : len(logprobs) + 1 + len(rows_TV)]
        known_TV = rows_TV[: len(targets)].numpy()
        logprobs += token_logprobs(known_TV, np.array(targets, dtype=np.int64)).tolist()
        next_token = int(rows_TV[-1].argmax())
        if keep_logits:
            kept += rows_TV.tolist()
    found: dict[str, Any] = {"logprobs": logprobs, "next_token": next_token}
    return {**found, "logits": kept} if keep_logits else found


def _tokens(token_ids: str | None, token_file: Path | None) -> list[int]:
    """The tokens of one of the two options.

    Raises:
        BadRequestError: none or both are given, the file cannot be read, or something is no number.
    """
    if (token_ids is None) == (token_file is None):
        raise BadRequestError(
            "give either --token-ids or --token-file",
            remedy="e.g. --token-ids 1,2,3", param="token_ids",
        )  # fmt: skip
    if token_file is None:
        return _parse(token_ids or "")
    try:
        return _parse(token_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(
            f"cannot read {token_file}: {error}", remedy="give a text file", param="token_file"
        ) from error


def _parse(text: str) -> list[int]:
    parts = [part.strip() for part in text.strip().rstrip(",").split(",")]
    wrong = [part for part in parts if not _NUMBER.fullmatch(part)]
    if wrong:
        raise BadRequestError(
            f"{wrong[0][:80]!r} is no token id; a comma-separated list of numbers is wanted",
            remedy="give e.g. --token-ids 1,2,3", param="token_ids",
        )  # fmt: skip
    return [int(part) for part in parts]
