"""`KimiClient` and `AsyncKimiClient`: thin typed clients whose streams survive broken connections.

Bodies are OpenAI's; what is added is the resume: a broken stream reconnects with the same
`x-request-id` and `Last-Event-ID` and goes on at the next event. The stock `openai` client works
too, it only does not resume.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from k3ray.client.session import StreamEvent, StreamSession, check_answer, typed_failures
from k3ray.errors import K3RayError
from k3ray.ids import new_id

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _options(base_url: str, api_key: str, timeout_s: float) -> dict[str, Any]:
    """`timeout_s` bounds each wait (connect, next bytes); streams send a comment every 10 s."""
    return {
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": {"authorization": f"Bearer {api_key}"},
        "timeout": timeout_s,
        "trust_env": False,
    }


class KimiClient:
    """Blocking client.

    Args:
        base_url: With or without `/v1`.
        timeout_s: Longest silence of a stream.
        whole_s: Longest wait for a whole answer.
        max_breaks: See `StreamSession`.
    """

    def __init__(
        self, base_url: str, *, api_key: str = "none", timeout_s: float = 60.0,
        whole_s: float = 600.0, max_breaks: int = 10,
    ) -> None:  # fmt: skip
        self._http = httpx.Client(**_options(base_url, api_key, timeout_s))
        self._max_breaks = max_breaks
        self._whole_s = whole_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> list[str]:
        """Names that the endpoint serves."""
        answer = self._http.get("/v1/models")
        check_answer(answer)
        return [entry["id"] for entry in answer.json()["data"]]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str = "kimi-k3", **params: Any
    ) -> dict[str, Any]:
        """A whole chat answer (OpenAI's object); raises typed errors of `k3ray.errors`."""
        return self._whole(_CHAT, {"model": model, "messages": list(messages), **params})

    def complete(
        self, prompt: str | Sequence[int], *, model: str = "kimi-k3", **params: Any
    ) -> dict[str, Any]:
        """A whole completion (OpenAI's object)."""
        return self._whole(_COMPLETIONS, {"model": model, "prompt": prompt, **params})

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str = "kimi-k3", **params: Any
    ) -> Iterator[StreamEvent]:
        """A chat answer, event by event, each once, across broken connections."""
        return self._stream(_CHAT, {"model": model, "messages": list(messages), **params})

    def stream_completion(
        self, prompt: str | Sequence[int], *, model: str = "kimi-k3", **params: Any
    ) -> Iterator[StreamEvent]:
        """A completion, event by event (see `stream_chat`)."""
        return self._stream(_COMPLETIONS, {"model": model, "prompt": prompt, **params})

    def _whole(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with typed_failures(path, self._whole_s):
            answer = self._http.post(path, json=dict(body), timeout=self._whole_s)
        check_answer(answer)
        document: dict[str, Any] = answer.json()
        return document

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[StreamEvent]:
        session = StreamSession(body, request_id=new_id("req"), max_breaks=self._max_breaks)
        while not session.done:
            broken: Exception | None = None
            try:
                with self._http.stream(
                    "POST", path, json=session.body, headers=session.headers
                ) as answer:
                    if not answer.is_success:
                        answer.read()
                    check_answer(answer)
                    for line in answer.iter_lines():
                        yield from session.feed(line)
            except (httpx.TransportError, K3RayError) as error:
                broken = error
            if not session.done:
                time.sleep(session.broken(broken))


class AsyncKimiClient:
    """As `KimiClient`, for asyncio."""

    def __init__(
        self, base_url: str, *, api_key: str = "none", timeout_s: float = 60.0,
        whole_s: float = 600.0, max_breaks: int = 10,
    ) -> None:  # fmt: skip
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(**_options(base_url, api_key, timeout_s), limits=limits)
        self._max_breaks = max_breaks
        self._whole_s = whole_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names that the endpoint serves."""
        answer = await self._http.get("/v1/models")
        check_answer(answer)
        return [entry["id"] for entry in answer.json()["data"]]

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str = "kimi-k3", **params: Any
    ) -> dict[str, Any]:
        """A whole chat answer."""
        return await self._whole(_CHAT, {"model": model, "messages": list(messages), **params})

    async def complete(
        self, prompt: str | Sequence[int], *, model: str = "kimi-k3", **params: Any
    ) -> dict[str, Any]:
        """A whole completion."""
        return await self._whole(_COMPLETIONS, {"model": model, "prompt": prompt, **params})

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str = "kimi-k3", **params: Any
    ) -> AsyncIterator[StreamEvent]:
        """A chat answer, event by event, each once, across broken connections."""
        return self._stream(_CHAT, {"model": model, "messages": list(messages), **params})

    def stream_completion(
        self, prompt: str | Sequence[int], *, model: str = "kimi-k3", **params: Any
    ) -> AsyncIterator[StreamEvent]:
        """A completion, event by event."""
        return self._stream(_COMPLETIONS, {"model": model, "prompt": prompt, **params})

    async def _whole(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with typed_failures(path, self._whole_s):
            answer = await self._http.post(path, json=dict(body), timeout=self._whole_s)
        check_answer(answer)
        document: dict[str, Any] = answer.json()
        return document

    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[StreamEvent]:
        session = StreamSession(body, request_id=new_id("req"), max_breaks=self._max_breaks)
        while not session.done:
            broken: Exception | None = None
            try:
                async with self._http.stream(
                    "POST", path, json=session.body, headers=session.headers
                ) as answer:
                    if not answer.is_success:
                        await answer.aread()
                    check_answer(answer)
                    async for line in answer.aiter_lines():
                        for event in session.feed(line):
                            yield event
            except (httpx.TransportError, K3RayError) as error:
                broken = error
            if not session.done:
                await asyncio.sleep(session.broken(broken))
