"""The Ray Serve deployment: one ingress process, from its boot values to its FastAPI app."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from fastapi import FastAPI
from ray import serve

from k3ray.errors import ConfigError
from k3ray.serve.controller_watch import watch_controller
from k3ray.serve.health import Health
from k3ray.serve.ray_router import RayStackRouter
from k3ray.serve.routes import build_routes
from k3ray.serve.service import ServeSettings, Service
from k3ray.text.tokenizer import K3Tokenizer

APP_NAME = "k3ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressBoot:
    """What a replica is born with.

    Args:
        tokenizer_file: A `tokenizer.json` or `tiktoken.model`; None means one token per byte.
        endpoint: The public URL, for the status document.
        controller_s: How long a question is repeated while the controller is being replaced.
        stopped_s: How long the controller may be stopped before it is ended.
    """

    settings: ServeSettings
    tokenizer_file: str | None
    endpoint: str
    web_dir: str
    controller_s: float
    stopped_s: float


class Ingress:
    """One replica; Serve asks it for its ASGI app."""

    def __init__(self, boot: IngressBoot) -> None:
        self._boot = boot

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build everything in the replica's own process."""
        boot = self._boot
        rank = serve.get_replica_context().rank.rank
        router = RayStackRouter(f"ingress-{rank}", controller_s=boot.controller_s)
        service = Service(
            boot.settings,
            router,
            load_tokenizer(boot.tokenizer_file, boot.settings.bounds.vocab_size),
        )

        @asynccontextmanager
        async def registered() -> AsyncIterator[None]:
            address: Callable[[], str] = ray.util.get_node_ip_address
            beside = (
                router.stay_registered(pid=os.getpid(), node=address(), endpoint=boot.endpoint),
                watch_controller(router.controller_process, stopped_s=boot.stopped_s),
            )
            tasks = [asyncio.create_task(work) for work in beside]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return build_routes(service, Health(router), Path(boot.web_dir), beside=registered)


def load_tokenizer(tokenizer_file: str | None, vocab_size: int) -> K3Tokenizer:
    """The tokenizer of a file; None means one token per byte.

    Raises:
        DataError: the file is missing or not one of ours.
        ConfigError: it has more ids than the model.
    """
    if tokenizer_file is None:
        return K3Tokenizer.byte_level(vocab_size)
    tokenizer = K3Tokenizer.load(tokenizer_file)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{tokenizer_file} has {tokenizer.vocab_size} ids, the model {vocab_size}",
            remedy="use the tokenizer that the model was trained with",
            violations=["tokenizer_file"],
        )
    return tokenizer
