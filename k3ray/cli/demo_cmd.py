"""`k3ray demo`: a random `k3-tiny` behind the endpoint, first token and one kill, in a minute."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli.kill_show import kill_during_stream
from k3ray.cli.narrate import Narrator
from k3ray.cli.supernode_args import read_cluster, read_spec
from k3ray.config.home import Home


def demo(
    keep: Annotated[bool, typer.Option(help="stay up until Ctrl-C")] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port (default: a free one)")
    ] = None,
) -> None:
    """Show the whole machine on random weights, in a home of its own that is removed after."""
    if not _demo(keep=keep, port=port):
        raise typer.Exit(1)


def _demo(*, keep: bool, port: int | None) -> bool:
    """Whether the tokens were the same and nothing was left over."""
    narrator = Narrator()
    root = Path(tempfile.mkdtemp(prefix="k3ray-demo-"))
    home = Home(root=root)
    try:
        same, url = _show(home, narrator, port)
        if keep:
            narrator.say(f"page {url}/ui, endpoint {url}/v1")
            narrator.say(f"stays up until Ctrl-C (K3RAY_HOME={root})")
            _wait_for_interrupt()
    finally:
        from k3ray.actors.supernode import down

        with narrator.phase("taking everything down"):
            left = down(home, say=narrator.say)
        shutil.rmtree(root, ignore_errors=True)
    return same and not left


def _show(home: Home, narrator: Narrator, port: int | None) -> tuple[bool, str]:
    """Whether the tokens were the same, and where the endpoint is."""
    from k3ray.actors.local_ray import free_port
    from k3ray.actors.supernode import ensure_up
    from k3ray.serve.app import deploy

    spec = read_spec(None, ["name=k3-demo"], "k3-tiny")
    with narrator.phase("bringing up Ray, two expert groups and an attention stack"):
        supernode = ensure_up(spec, home, read_cluster(None), say=narrator.say)
    with narrator.phase("deploying the endpoint"):
        url = deploy(supernode, port=port or free_port())
    ready_s = narrator.elapsed_s
    report = kill_during_stream(
        url, lambda: supernode.call("status"), prompt="Hello, supernode: ", num_tokens=32,
        say=narrator.say,
    )  # fmt: skip
    first_s = ready_s + report.undisturbed.first_token_s
    narrator.say(f"first token {first_s:.1f} s after the command (random weights: noise as text)")
    narrator.say(
        f"{report.group} rebuilt in {report.rebuild_s:.2f} s, the stream waited "
        f"{report.stall_s:.2f} s, plan {report.plan_before} -> {report.plan_after}, tokens and "
        f"log-prob bits {'unchanged' if report.same_bits else 'CHANGED'}"
    )
    return report.same_bits, url


def _wait_for_interrupt() -> None:
    import threading

    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return
