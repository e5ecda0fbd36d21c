"""The whole answer at once: an oracle for `AnswerParser` that shares no code with it.

It builds the tree of elements first and reads the tree afterwards; every text is decoded whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.xtml_parser import CallText, ChannelText, Found


@dataclass
class Node:
    """An element; `children` are texts and elements."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[str | Node] = field(default_factory=list)


def tree_of(tokens: Sequence[int], tokenizer: K3Tokenizer, channel: str) -> Node:
    """The elements of an answer that begins inside `channel`."""
    names = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    controls = {tokenizer.special(name): name for name in names}
    root = Node("message")
    path = [root, Node(channel)]
    root.children.append(path[1])
    tag, text = "", list[int]()

    def cut(name: str) -> int:
        return len(path) - 1 - [node.name for node in reversed(path)].index(name)

    for token in [*tokens, None]:
        control = "" if token is None else controls.get(token, "")
        if token is not None and not control:
            text.append(token)
            continue
        written = tokenizer.decode(text)
        text = []
        if not tag and path:
            path[-1].children.append(written)
        elif tag and control == "<|sep|>":
            name = written.split(" ")[0]
            open_names = [node.name for node in path]
            if tag == "<|open|>":
                for kind in {"call": ["call"], "argument": ["argument", "json"],
                             "json": ["argument", "json"]}.get(name, []):  # fmt: skip
                    if kind in [node.name for node in path]:
                        del path[cut(kind) :]
                found = re.findall(r'\s([^\s="]+)="([^"]*)"', written)
                unescaped = {
                    key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found
                }
                node = Node(name, unescaped)
                (path[-1] if path else root).children.append(node)
                path.append(node)
            elif name in open_names:
                del path[cut(name) :]
        tag = control if control in ("<|open|>", "<|close|>") else ""
        if control == "<|end_of_msg|>":
            break
    return root


def read_whole(tokens: Sequence[int], tokenizer: K3Tokenizer, channel: str) -> dict[str, Any]:
    """Texts of the channels and (tool, arguments) of the calls; None where a limit cut them off,
    or where they are a block of text."""
    found: dict[str, Any] = {"think": "", "response": "", "calls": []}
    ended = tokenizer.special("<|end_of_msg|>") in tokens

    def walk(node: Node, call: list[Any] | None) -> None:
        for child in node.children:
            if isinstance(child, Node):
                inner = call
                if child.name == "call":
                    inner = [child.attributes.get("tool", ""), {}]
                    found["calls"].append(inner)
                elif child.name == "argument" and call is not None and call[1] is not None:
                    call[1][child.attributes.get("key", "")] = _value(child)
                elif child.name == "json" and call is not None and not call[1]:
                    call[1] = None
                walk(child, inner)
            elif node.name in ("think", "response"):
                found[node.name] += child

    walk(tree_of(tokens, tokenizer, channel), None)
    if not ended and found["calls"]:
        found["calls"][-1][1] = None
    found["calls"] = [tuple(call) for call in found["calls"]]
    return found


def _value(node: Node) -> Any:
    text = "".join(child for child in node.children if isinstance(child, str))
    if node.attributes.get("type", "string") == "string":
        return text
    try:
        value = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return text
    return value


def joined(found: Sequence[Found]) -> dict[str, Any]:
    """What a parser found: the text of the channels, and (tool, arguments) of every call."""
    texts = {"think": "", "response": ""}
    calls: list[list[str]] = []
    for part in found:
        if isinstance(part, ChannelText):
            texts[part.channel] += part.text
        elif isinstance(part, CallText) and part.tool is not None:
            calls.append([part.tool, part.arguments])
        else:
            calls[part.index][1] += part.arguments
    return {**texts, "calls": [(tool, arguments) for tool, arguments in calls]}


def finished(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Calls with their arguments as values."""
    return [(tool, json.loads(arguments)) for tool, arguments in calls]
