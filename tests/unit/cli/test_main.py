"""The command line: light, complete, and errors of one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest
import typer

from k3ray.cli.config_cmd import Kind, resolve
from k3ray.cli.main import COMMANDS, error_text, main
from k3ray.errors import CapacityError, ConfigError

RELEASE = Path(__file__).parents[2] / "support" / "data" / "kimi_k3_config.json"
HEAVY = ("torch", "ray", "mlflow", "transformers", "deepspeed")
LIMIT_S = 1.0


def _measured(arguments: list[str]) -> tuple[float, str, str]:
    """(CPU seconds, heavy modules loaded, output) of one command in a fresh interpreter.

    CPU time of the process, because the machine may be busy with other tests.
    """
    code = (
        "import sys, time\n"
        "from k3ray.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])\n"
        "print('CPU', time.process_time())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60,
        check=True, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    output, _, tail = done.stdout.partition("LOADED ")
    loaded, _, cpu = tail.partition("\nCPU ")
    return float(cpu), loaded, output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["config", "show"],
        ["config", "schema"],
        ["config", "show", "--preset", "kimi-k3"],
        ["up", "--help"],
    ],
    ids=" ".join,
)
def test_light_commands_load_nothing_heavy_and_are_fast(arguments: list[str]) -> None:
    cpu_s, loaded, output = min(_measured(arguments) for _ in range(2))
    assert loaded == "[]"
    assert cpu_s < LIMIT_S
    assert output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists(name: str) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    found = getattr(import_module(module), attribute)
    assert callable(found) or isinstance(found, typer.Typer)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_config_show_prints_yaml_and_digest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "show", "--preset", "k3-tiny", "groups=3"])
    lines = capsys.readouterr().out.splitlines()
    assert "preset: k3-tiny" in lines
    assert "groups: 3" in lines
    assert any(line.startswith("# digest: ") and len(line) == 74 for line in lines)


@pytest.mark.parametrize("kind", list(Kind))
def test_the_schema_of_every_config_takes_its_own_and_nothing_unknown(
    kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["config", "schema", "--schema-class", kind])
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    needed = {"curate": ["out_dir=x"], "pretrain": ["data_dir=x"]}.get(kind, [])
    preset = "kimi-k3" if kind is Kind.MODEL else None
    resolved = resolve(kind, config=None, preset=preset, overrides=needed)
    document = json.loads(resolved.model_dump_json())
    validator.validate(document)
    wrong = [{**document, "unknown_key": 1}, [], {**document, next(iter(document)): {"a": [None]}}]
    assert all(not validator.is_valid(each) for each in wrong)


def test_config_show_of_the_release_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "show", "--schema-class", "model", "--config", str(RELEASE)])
    shown = capsys.readouterr().out
    assert "2,779,484,476,000 text parameters, 104,189,612,640 active" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grups=3"], "grups: unknown key (did you mean 'groups'?)"),
        (["--preset", "k3-nanno"], "did you mean 'k3-nano'"),
        (["--schema-class", "cluster", "--preset", "k3-tiny"], "--preset has no meaning"),
        (["--config", "absent.yaml"], "cannot read config file absent.yaml"),
        (["--schema-class", "model", "text_config.num_experts=1"], "num_experts_per_token"),
    ],
)
def test_errors_are_one_line_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error[config_error]: ")
    assert message in lines[0]
    assert " -> " in lines[0]


@pytest.mark.parametrize(
    "option",
    [
        ["--hbm-gib", "inf"], ["--hbm-gib", "1e308"], ["--host-gib", "inf"],
        ["--accelerators", "1000000000000000"],
    ],
)  # fmt: skip
def test_a_plan_for_no_real_machine_is_a_usage_error(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *option])
    assert ended.value.code == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize("home", ["/proc/nope", "/etc/passwd", "/etc/passwd/below"])
@pytest.mark.parametrize("command", ["up", "serve", "down"])
def test_a_home_that_cannot_be_used_is_a_typed_error(
    home: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K3RAY_HOME", home)
    assert main([command]) == 2
    assert f"error[supernode]: the home {home} cannot be used" in capsys.readouterr().err


def test_sigterm_ends_a_command_with_its_status_and_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended_meanwhile(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10.0)

    monkeypatch.setenv("K3RAY_HOME", str(tmp_path))
    monkeypatch.setattr("k3ray.actors.supernode.ensure_up", ended_meanwhile)
    with pytest.raises(SystemExit) as ended:
        main(["up", "--preset", "k3-tiny"])
    assert ended.value.code == 143
    assert "interrupted: `k3ray status` says what is up" in capsys.readouterr().out


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3RAY_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(["config", "show", "grups=3"])


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["destroy"])
    assert ended.value.code == 2
    assert "No such command 'destroy'" in capsys.readouterr().err


def test_long_messages_keep_their_remedy_on_the_first_line() -> None:
    error = CapacityError("full\nline 2", remedy="wait")
    assert error_text(error) == "error[capacity]: full -> wait\nline 2"
