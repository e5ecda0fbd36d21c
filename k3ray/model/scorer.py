"""Teacher-forced scoring of a checkpoint in one process, by the serving path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.errors import BadRequestError, ContextLengthError, NumericError
from k3ray.model.checkpoint_codec import read_dense, read_expert
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.expert_stack import all_experts
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.serve_state import SeqSpan, ServeState
from k3ray.ops.ragged import CHUNK
from k3ray.weights.checkpoint import Checkpoint

PREFILL_TOKENS = 256
_VERSION = "checkpoint"


class CheckpointScorer:
    """A checkpoint's model, all of it in this process.

    Args:
        path: The checkpoint's folder.
        numeric: Numeric mode.

    Raises:
        CheckpointError: it is not whole; nothing is kept.
    """

    def __init__(self, path: Path, *, numeric: NumericMode = NumericMode.DETERMINISTIC) -> None:
        checkpoint = Checkpoint.open(path)
        self.text: TextConfig = checkpoint.model.text_config
        self._sees_images = checkpoint.model.vision_config is not None
        self._numeric = numeric
        self.model = K3Model(self.text, numeric=numeric)
        self.model.load_state_dict(read_dense(checkpoint), strict=True)
        self.model.requires_grad_(requires_grad=False)
        bank = ExpertBank(self.text, all_experts(self.text))
        bank.load_version(_VERSION, {
            name: tensor
            for layer in self.text.moe_layers
            for expert in range(self.text.num_experts)
            for name, tensor in read_expert(checkpoint, layer, expert).items()
        })  # fmt: skip
        self._executor = LocalExecutor(bank, version=_VERSION)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float32 logits after every token; raises as `rows`."""
        return torch.cat(list(self.rows(token_ids)))

    def rows(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Logits [t, V] float32 of one piece after the other, t at most `PREFILL_TOKENS`.

        A bad input is raised here, not at the first piece.

        Raises:
            NumericError: (at a piece) a logit is not finite.
            BadRequestError: no tokens, an id out of range, or the image placeholder of a model
                that has a vision tower.
            ContextLengthError: more tokens than the model's context.
        """
        self._check(token_ids)
        return self._pieces(token_ids)

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        tokens_T = torch.tensor(list(token_ids), dtype=torch.int64)
        num_pages = -(-len(tokens_T) // CHUNK)
        state = ServeState(self.text, num_slots=1, num_pages=num_pages, numeric=self._numeric)
        for start in range(0, len(tokens_T), PREFILL_TOKENS):
            part_T = tokens_T[start : start + PREFILL_TOKENS]
            span = SeqSpan(slot=0, pages=tuple(range(num_pages)), start=start, length=len(part_T))
            logits_TV = self.model.forward_serve(
                part_T, [span], state, self._executor, all_rows=True
            )
            if not bool(torch.isfinite(logits_TV).all()):
                raise NumericError(
                    f"the model gives NaN or infinity between tokens {start} and "
                    f"{start + len(part_T) - 1}",
                    remedy="its weights are finite but too large to compute with",
                )
            yield logits_TV

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise BadRequestError("no token ids", remedy="give at least one", param="token_ids")
        vocab, context = self.text.vocab_size, self.text.max_position_embeddings
        if len(token_ids) > context:
            raise ContextLengthError(
                f"{len(token_ids)} tokens, the model's context is {context}",
                remedy="give fewer tokens", param="token_ids",
            )  # fmt: skip
        wrong = [t for t in token_ids if not 0 <= t < vocab]
        if wrong:
            raise BadRequestError(
                f"token ids {wrong[:5]} are not in 0..{vocab - 1}",
                remedy="use the checkpoint's own tokenizer", param="token_ids",
            )  # fmt: skip
        media = vocab - MEDIA_PAD_FROM_END
        if self._sees_images and media in token_ids:
            raise BadRequestError(
                f"token {media} stands for an image, and images are not computed",
                remedy="score text only", param="token_ids",
            )  # fmt: skip


MEDIA_PAD_FROM_END = 163840 - 163605
"""`<|media_pad|>` counted from the end of the vocabulary, where the special tokens lie."""
