"""A checked call -> prompts in tokens, each with the room that is left for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from k3ray.serve.api import Call, CallKind, check_tokens, fit_max_tokens
from k3ray.text.chat import Channel, Effort
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.xtml import render_chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, ready for a stack.

    Args:
        channel: Where a chat answer begins; None for a completion.
        echo: Text to send before the answer, if any.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    channel: Channel | None = None
    echo: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBounds:
    """What a prompt and its answer must fit into.

    Args:
        context: Tokens that prompt and answer may have together.
        default_max_tokens: For requests that name none.
        default_thinking: Whether chat answers begin in the think channel when not asked for.
    """

    vocab_size: int
    context: int
    default_max_tokens: int = 256
    default_thinking: bool = False


async def render_prompts(
    call: Call, tokenizer: K3Tokenizer, bounds: PromptBounds
) -> Sequence[Prompt]:
    """Render and tokenise in a thread (a long prompt must not hold up other streams).

    Raises:
        BadRequestError: a token id outside the vocabulary.
        ContextLengthError: a prompt with its answer does not fit.
    """
    return await asyncio.to_thread(_render, call, tokenizer, bounds)


def _render(call: Call, tokenizer: K3Tokenizer, bounds: PromptBounds) -> list[Prompt]:
    if call.kind is CallKind.CHAT:
        thinking = bounds.default_thinking if call.thinking is None else call.thinking
        effort = (call.turn.effort or Effort.MAX) if thinking else None
        rendered = render_chat(
            call.messages,
            tokenizer=tokenizer,
            options=replace(call.turn, thinking=thinking, effort=effort),
        )
        return [_prompt(call, tokenizer, bounds, rendered.tokens, rendered.channel)]
    return [
        _prompt(call, tokenizer, bounds, _completion_tokens(text, tokenizer, bounds), None)
        for text in call.prompts
    ]


def _prompt(
    call: Call, tokenizer: K3Tokenizer, bounds: PromptBounds, tokens: tuple[int, ...],
    channel: Channel | None,
) -> Prompt:  # fmt: skip
    return Prompt(
        tokens=tokens,
        max_tokens=fit_max_tokens(
            call.max_tokens,
            num_prompt_tokens=len(tokens),
            context=bounds.context,
            default=bounds.default_max_tokens,
            param="messages" if call.kind is CallKind.CHAT else "prompt",
        ),
        stop_token_ids=()
        if call.sampling.ignore_eos
        else (tokenizer.eos_id, tokenizer.end_of_msg_id),
        channel=channel,
        echo=tokenizer.decode(tokens, skip_special=False) if call.echo else None,
    )


def _completion_tokens(
    prompt: str | tuple[int, ...], tokenizer: K3Tokenizer, bounds: PromptBounds
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    check_tokens(prompt, vocab_size=bounds.vocab_size)
    return prompt
