"""Loading configs: precedence, overrides, strictness, and every violation at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.jobs import CurateConfig, PretrainConfig
from k3ray.config.load import config_digest, load_config, to_yaml
from k3ray.config.supernode import SupernodeSpec
from k3ray.config.yaml_text import dump_yaml, parse_scalar, parse_yaml
from k3ray.errors import ConfigError


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _violations(tmp_path: Path, text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(SupernodeSpec, _file(tmp_path, text), overrides)
    violations: tuple[str, ...] = caught.value.fields["violations"]
    assert all(violation in str(caught.value) for violation in violations)
    return violations


def test_defaults_then_base_then_file_then_overrides(tmp_path: Path) -> None:
    path = _file(tmp_path, "groups: 3\nstacks: 2\n")
    spec = load_config(SupernodeSpec, path, ["stacks=4"], base={"groups": 9, "seed": 5})
    assert (spec.groups, spec.stacks, spec.seed, spec.line) == (3, 4, 5, "main")


def test_yaml_1_2_scalars(tmp_path: Path) -> None:
    path = _file(tmp_path, "name: on\npreset: no\nline: 2020-01-01\ndeadlines: {hop_s: 1e-4}\n")
    spec = load_config(SupernodeSpec, path)
    assert (spec.name, spec.preset, spec.line) == ("on", "no", "2020-01-01")
    assert spec.deadlines.hop_s == 1e-4


def test_a_section_given_in_part_keeps_the_defaults_of_its_place(tmp_path: Path) -> None:
    from_override = load_config(SupernodeSpec, None, ["lanes.serve.credit_bytes=7"])
    from_file = load_config(SupernodeSpec, _file(tmp_path, "lanes: {serve: {credit_bytes: 7}}"))
    assert from_override == from_file
    assert from_override.lanes.serve.min_share == 0.3
    assert from_override.lanes.train == SupernodeSpec().lanes.train


def test_section_inside_a_section_of_a_job() -> None:
    config = load_config(PretrainConfig, None, ["data_dir=/d", "supernode.engine.num_pages=9"])
    assert config.supernode.engine.num_pages == 9
    assert config.supernode.engine.max_running == 16


def test_override_adds_to_a_free_form_mapping() -> None:
    config = load_config(LocalClusterConfig, None, ["resources.k3_group=3"])
    assert dict(config.resources) == {"k3_group": 3, "k3_stack": 8}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("0x10", 16), ("true", True), ("on", "on"), ("null", None), ("", None),
        ("a #1", "a #1"), ("a: b", "a: b"), ("*.py", "*.py"), ("'1'", "1"), ("[1, [2]]", [1, [2]]),
        ("{a: 1}", {"a": 1}), ("2020-01-01", "2020-01-01"), ("@x", "@x"), ("-", "-"),
        ("/a=b", "/a=b"), ("<<", "<<"), ("=", "="), ("#", "#"),
    ],
)  # fmt: skip
def test_override_values(text: str, value: object) -> None:
    parsed = parse_scalar(text, where="x")
    assert parsed == value
    assert type(parsed) is type(value)


def test_every_violation_at_once_with_the_nearest_key(tmp_path: Path) -> None:
    violations = _violations(
        tmp_path,
        "grups: 2\nseed: 2.0\nstacks: '1'\nengine: {max_runing: 3}\nport: 1\n",
        "deadlines.hop_s=.inf", "a", "x..y=1", "partition=[[0", "name.z=1", "seed.deep=1",
    )  # fmt: skip
    expected = [
        "grups: unknown key (did you mean 'groups'?)",
        "stacks: input should be a valid integer, got '1'",
        "engine.max_runing: unknown key (did you mean 'engine.max_running'?)",
        "port: unknown key (did you mean 'endpoint.port'?)",
        "deadlines.hop_s: input should be a finite number, got inf",
        "override 'a': not of the form key=value or section.key=value",
        "override 'x..y=1': not of the form key=value or section.key=value",
        "seed: input should be a valid integer, got 2.0",
        "seed.deep: seed is 2.0, not a section",
    ]
    assert set(expected) <= set(violations)
    assert any(text.startswith("override partition:") for text in violations)
    assert any(text.startswith("name: input should be a valid string") for text in violations)


def test_required_and_cross_field_violations() -> None:
    with pytest.raises(ConfigError, match="out_dir: required, but not given"):
        load_config(CurateConfig, None)
    with pytest.raises(ConfigError, match=r"partition has 1 parts but groups is 2"):
        load_config(SupernodeSpec, None, ["partition=[[0]]"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "duplicate key"), ("- 1\n", "not a mapping"), ("a: [1\n", "line 2"),
        ("1: 2\n", "is not a string"), ("a: &x [*x]\n", "nesting deeper"),
        ("a: 1\n---\nb: 1\n", "document"), ("a: !!binary aGk=\n", "bytes"),
        ("a: " + "[" * 2_000, "nesting deeper"), ("seed: " + "9" * 5000, "YAML"),
        ("a: \x00\n", "not valid YAML"), ("a: !!python/name:os.system\n", "YAML"),
    ],
)  # fmt: skip
def test_bad_files_are_config_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SupernodeSpec, _file(tmp_path, text))
    assert message in str(caught.value)


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot read config file"):
            load_config(SupernodeSpec, str(path))


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(SupernodeSpec, _file(tmp_path, "# nothing\n")) == SupernodeSpec()


def test_resolved_yaml_reads_back_and_the_digest_follows_the_values(tmp_path: Path) -> None:
    spec = load_config(SupernodeSpec, None, ["deadlines.hop_s=1e-7", "partition=[[0], [1, 2]]"])
    again = load_config(SupernodeSpec, _file(tmp_path, to_yaml(spec)))
    assert again == spec
    assert config_digest(again) == config_digest(spec)
    assert config_digest(spec) != config_digest(SupernodeSpec())


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs", "Cc"])), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=30)
@given(st.dictionaries(st.text("abcd", min_size=1), _json, max_size=4))
def test_yaml_round_trip(value: dict[str, object]) -> None:
    assert parse_yaml(dump_yaml(value), where="x") == value


def test_the_step_budget_must_leave_room_for_prefill() -> None:
    with pytest.raises(ConfigError, match="step_token_budget"):
        load_config(SupernodeSpec, None, ["engine.max_running=16", "engine.step_token_budget=64"])
