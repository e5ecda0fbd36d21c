"""`k3ray score`: log-probabilities of given tokens under a checkpoint; no cluster needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from k3ray.config.numeric import NumericMode
from k3ray.errors import BadRequestError


def score(
    checkpoint: Annotated[Path, typer.Option(help="folder in the release's layout")],
    token_ids: Annotated[str, typer.Option(help="comma-separated token ids")],
    *,
    logits: Annotated[bool, typer.Option("--logits", help="all logits after every token")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="fast instead of deterministic")] = False,
) -> None:
    """Teacher-forced log-probabilities of token_ids[1:], by the serving path."""
    tokens = _parse(token_ids)
    import numpy as np
    import torch

    from k3ray.model.scorer import CheckpointScorer
    from k3ray.ops.logprobs import token_logprobs

    torch.set_num_threads(1)  # part of the numeric mode
    numeric = NumericMode.FAST if fast else NumericMode.DETERMINISTIC
    rows_TV = CheckpointScorer(checkpoint, numeric=numeric).logits(tokens)
    logprobs_T = token_logprobs(rows_TV[:-1].numpy(), np.array(tokens[1:], dtype=np.int64))
    document: dict[str, Any] = {
        "token_ids": tokens,
        "logprobs": logprobs_T.tolist(),
        "next_token": int(rows_TV[-1].argmax()),
        "numeric_mode": str(numeric),
    }
    if logits:
        document["logits"] = rows_TV.tolist()
    if as_json:
        typer.echo(json.dumps(document))
        return
    for token, value in zip(tokens[1:], document["logprobs"], strict=True):
        typer.echo(f"{token:>8} {value:.6f}")
    typer.echo(f"most likely next token: {document['next_token']}")


def _parse(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BadRequestError(
            f"--token-ids {text[:80]!r} is no comma-separated list of numbers",
            remedy="give e.g. --token-ids 1,2,3", param="token_ids",
        ) from error  # fmt: skip
