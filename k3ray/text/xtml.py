"""XTML, K3's chat format: messages to tokens, in segments that text can never forge.

    <|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>

Only `_Renderer` writes control tokens; texts, tag names and attributes are encoded on their own
with special tokens disallowed. No newline between elements, no BOS.
Source: `encoding_k3` of the release, as described in the model's architecture notes, section 10;
the sentence under "# Tools" is ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from k3ray.errors import BadRequestError
from k3ray.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from k3ray.text.tokenizer import K3Tokenizer

THINK, RESPONSE = "think", "response"
ROLES = ("system", "user", "assistant", "tool")
_TOOLS_SENTENCE = "You may call these tools; each is described by a JSON schema."


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: K3Tokenizer,
    thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    generation_prompt: bool = True,
) -> list[int]:
    """The tokens of a conversation, up to where the model goes on.

    Args:
        messages: Mappings with `role` (system, user, assistant, tool), `content` (a string or
            a list of `{"type": "text", "text": ...}` parts, joined), and optionally `name`; an
            assistant's `reasoning_content`; a tool result's `tool` (its name) and `index`.
        tokenizer: The model's.
        thinking: Whether assistant messages have a `think` channel; it is then always there.
        tools: JSON schemas of the tools the model may call.
        generation_prompt: End with an open assistant message and an open channel.

    Raises:
        BadRequestError: an unknown role, or content that is no text.
    """
    renderer = _Renderer(tokenizer)
    if tools:
        renderer.message({"role": "system", "type": "tool-declare"}, _tools_text(tools))
    for place, message in enumerate(messages):
        _render_message(renderer, message, thinking=thinking, place=place)
    if generation_prompt:
        renderer.open("message", {"role": "assistant"})
        renderer.open(THINK if thinking else RESPONSE)
    return renderer.tokens


class _Renderer:
    """Collects tokens; the only place where control tokens come from."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []

    def open(self, name: str, attributes: Mapping[str, str] | None = None) -> None:
        written = "".join(
            f' {key}="{_escaped(value)}"' for key, value in (attributes or {}).items()
        )
        self._control(OPEN)
        self.text(name + written)
        self._control(SEP)

    def close(self, name: str) -> None:
        self._control(CLOSE)
        self.text(name)
        self._control(SEP)

    def text(self, text: str) -> None:
        self.tokens += self._tokenizer.encode(text)

    def element(self, name: str, body: str) -> None:
        self.open(name)
        self.text(body)
        self.close(name)

    def message(self, attributes: Mapping[str, str], body: str) -> None:
        self.open("message", attributes)
        self.text(body)
        self.end_message()

    def end_message(self) -> None:
        self.close("message")
        self._control(END_OF_MSG)

    def _control(self, name: str) -> None:
        self.tokens.append(self._tokenizer.special(name))


def _render_message(
    renderer: _Renderer, message: Mapping[str, Any], *, thinking: bool, place: int
) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise _bad(f"messages[{place}].role", f"{role!r} is not one of {', '.join(ROLES)}")
    content = _text_of(message.get("content"), f"messages[{place}].content")
    attributes = {"role": str(role)}
    if message.get("name"):
        attributes["name"] = str(message["name"])
    if role == "tool":
        attributes |= {
            key: str(message[key]) for key in ("tool", "index") if message.get(key) is not None
        }
    if role != "assistant":
        renderer.message(attributes, content)
        return
    renderer.open("message", attributes)
    if thinking:
        renderer.element(THINK, _text_of(message.get("reasoning_content"), f"messages[{place}]"))
    renderer.element(RESPONSE, content)
    renderer.end_message()


def _text_of(content: object, place: str) -> str:
    """Text parts are joined before they are encoded: a border between parts is no border."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _bad(place, f"must be a string or a list of parts, not {type(content).__name__}")
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(text, str):
            raise _bad(f"{place}[{index}]", 'must be {"type": "text", "text": "..."}')
        texts.append(text)
    return "".join(texts)


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"# Tools\n{_TOOLS_SENTENCE}\n\n```json\n{listed}\n```"


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _bad(place: str, problem: str) -> BadRequestError:
    return BadRequestError(f"{place}: {problem}", remedy="see the chat format", param=place)
