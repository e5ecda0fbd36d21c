"""An endpoint over an in-memory supernode of two scripted stacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.endpoint import Endpoint, running_endpoint
from tests.support.scripted_router import ScriptedRouter


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter(num_stacks=2)


@pytest.fixture
def endpoint(router: ScriptedRouter) -> Iterator[Endpoint]:
    with running_endpoint(router) as running:
        yield running
