"""`make quickstart`: the whole line in one command, told as it goes.

Local Ray -> curate this Python installation -> pretrain `k3-nano` on the expert groups -> publish
-> serve from the very same actors -> ask through the `openai` client -> kill a group in the middle
of a stream -> where to look. `ONCE=1` ends everything and exits with a status; otherwise it stays
up until Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from k3ray.cli.kill_show import KillReport, kill_during_stream
from k3ray.cli.narrate import Narrator, without_ray_chatter
from k3ray.cli.supernode_args import read_cluster, read_spec
from k3ray.config.home import Home
from k3ray.errors import ConfigError, K3RayError

ROOT = Path(__file__).parents[2]
PROMPT = "def read_file(path):\n    "


def main() -> int:
    """Run the quickstart; returns the exit status."""
    with without_ray_chatter():  # also while it ends: Ray reports the killed processes then
        return _guarded()


def _guarded() -> int:
    home = Home(root=Path(os.environ.get("K3RAY_HOME") or ROOT / ".k3ray").absolute())
    once = os.environ.get("ONCE", "") not in ("", "0")
    narrator = Narrator()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return 0 if _run(home, narrator, stay=not once) else 1
    except K3RayError as error:
        narrator.say(f"error[{error.code}]: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        from k3ray.actors.supernode import down

        with narrator.phase("taking everything down"):
            down(home, say=narrator.say)


def _run(home: Home, narrator: Narrator, *, stay: bool) -> bool:
    from k3ray.actors.supernode import ensure_up
    from k3ray.serve.app import deploy

    data_dir, port = home.root / "data", _port()
    spec = read_spec(
        None,
        [f"tokenizer_file={data_dir / 'tokenizer' / 'tokenizer.json'}"],
        os.environ.get("PRESET", "k3-nano"),
    )
    with narrator.phase("bringing up a local Ray cluster and the supernode"):
        supernode = ensure_up(spec, home, read_cluster(None), say=narrator.say)
    jobs = supernode.info.dashboard_url
    with narrator.phase("curating the Python installation's own text (ray job submit)"):
        submit(narrator, jobs, "curate", "curate_python.yaml", [f"out_dir={data_dir}"])
    with narrator.phase("pretraining on the live expert groups (ray job submit)"):
        submit(
            narrator, jobs, "pretrain", "pretrain_nano.yaml",
            [f"data_dir={data_dir}", f"supernode.tokenizer_file={spec.tokenizer_file}"],
        )  # fmt: skip
    with narrator.phase("deploying the endpoint"):
        url = deploy(supernode, port=port)
    with narrator.phase("asking, then killing a group in the middle of a stream"):
        report = kill_during_stream(
            url, lambda: supernode.call("status"), prompt=PROMPT, num_tokens=48, say=narrator.say
        )
    _say_report(narrator, report)
    _say_where(narrator, home, url, jobs)
    narrator.say(
        "the line worked from end to end" if report.same_bits else "FAILED: other tokens came"
    )
    if stay:
        _stay(narrator)
    return report.same_bits


def submit(
    narrator: Narrator, jobs_url: str, pipeline: str, config: str, overrides: list[str]
) -> None:
    """`ray job submit` one of our pipelines and repeat its output.

    Raises:
        K3RayError: the job failed.
    """
    from k3ray.actors.local_ray import ray_command

    command = [
        *ray_command(), "job", "submit", "--address", jobs_url, "--working-dir", str(ROOT), "--",
        "python", "-m", f"pipelines.{pipeline}", "--config", f"pipelines/configs/{config}",
        *overrides,
    ]  # fmt: skip
    narrator.run(command, env=os.environ, limit_s=1800.0)


def _port() -> int:
    """The port to serve on, checked now and not after minutes of training."""
    from k3ray.serve.app import check_port_free

    text = os.environ.get("PORT", "8000")
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ConfigError(f"PORT is {text!r}", remedy="give a number from 1 to 65535")
    check_port_free("127.0.0.1", int(text))
    return int(text)


def _say_report(narrator: Narrator, report: KillReport) -> None:
    say = narrator.say
    say(f"answer: {report.disturbed.text!r}")
    say(
        f"stream across the kill: {'the same' if report.same_bits else 'OTHER'} "
        f"{len(report.disturbed.tokens)} tokens and log-prob bits as the undisturbed run; "
        f"expert calls repeated: {report.hop_retries}"
    )
    say(
        f"group {report.group} rebuilt in {report.rebuild_s:.2f} s; the stream waited "
        f"{report.stall_s:.2f} s; plan {report.plan_before} -> {report.plan_after}"
    )


def _say_where(narrator: Narrator, home: Home, url: str, dashboard: str) -> None:
    say = narrator.say
    say(
        "a few minutes of training are a demonstration, not a model: more steps help "
        "(`steps=` of pipelines.pretrain; the README has the curve)"
    )
    say(f"files      {home.root} (data, runs, store)")
    say(f"page       {url}/ui")
    say(f"endpoint   {url}/v1   (model: kimi-k3)")
    say(f"dashboard  {dashboard}")
    say(f"mlflow     mlflow ui --backend-store-uri sqlite:///{home.root / 'mlflow.db'}")
    say(f"status     K3RAY_HOME={home.root} k3ray status")


def _stay(narrator: Narrator) -> None:
    narrator.say("everything stays up until Ctrl-C")
    while True:
        time.sleep(3600.0)


if __name__ == "__main__":
    sys.exit(main())
