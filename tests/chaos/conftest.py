"""One live supernode with two stacks for all tests that leave it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import Live, live_supernode
from openai import OpenAI


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with live_supernode("stacks=2") as running:
        yield running


@pytest.fixture(scope="session")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=120)
