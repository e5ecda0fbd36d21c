"""Texts that no file holds: pydoc's language topics and the documentation of built-in modules.

Names are `topic/<name>` and `module/<name>`; only modules compiled into the interpreter are
rendered, because importing others could run anything.
"""

from __future__ import annotations

import importlib
import pydoc
import re
import sys
from typing import Final

PYDOC_SCHEME: Final = "pydoc"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def pydoc_names() -> list[str]:
    """All names, sorted."""
    modules = [
        name for name in sys.builtin_module_names
        if not name.startswith("_") and name not in {"sys", "posix", "xxsubtype"}
    ]  # fmt: skip
    return sorted([
        *(f"topic/{name}" for name in _topics()), *(f"module/{name}" for name in modules)
    ])  # fmt: skip


def pydoc_text(name: str) -> str:
    """The text of one name.

    Raises:
        FileNotFoundError: this interpreter has no such topic or module.
    """
    kind, _, key = name.partition("/")
    if kind == "topic" and key in _topics():
        return _topics()[key]
    if kind == "module" and key in sys.builtin_module_names:
        rendered = pydoc.plain(pydoc.render_doc(importlib.import_module(key)))
        return _ADDRESS.sub("", rendered)
    raise FileNotFoundError(name)


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return topics
