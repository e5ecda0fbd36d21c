"""`LastUp`: what was brought up last in a home, so that `k3ray up --resume` needs no arguments."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from k3ray.config.base import Strict
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import SupernodeError


class LastUp(Strict):
    """The spec, the local Ray node, and the port of the endpoint if one was deployed."""

    spec: SupernodeSpec
    cluster: LocalClusterConfig
    port: int | None = None

    def write(self, path: Path) -> None:
        """Write atomically."""
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @staticmethod
    def read(path: Path) -> LastUp | None:
        """None when nothing was ever brought up.

        Raises:
            SupernodeError: the file cannot be understood.
        """
        try:
            return LastUp.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValidationError, UnicodeDecodeError, OSError) as error:
            raise SupernodeError(
                f"{path} cannot be understood: {error}",
                remedy="run `k3ray up` with its config instead of --resume",
            ) from error
