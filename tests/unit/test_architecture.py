"""Architecture that fails CI: sizes, places, layers, errors, pins."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from k3ray import errors
from k3ray.cli.doctor_facts import read_pins, required_distributions
from k3ray.errors import K3RayError

ROOT = Path(__file__).parents[2]
CODE = ("k3ray", "kernels", "pipelines", "dashboards", "tests")
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_DECISION_LINES = 40

TOP_LEVEL = {
    "pyproject.toml", "README.md", "Makefile", "constraints.txt", "LICENSE", "CHANGELOG.md", ".ci",
    ".gitignore", ".rayignore", "k3ray", "kernels", "pipelines", "cluster", "dashboards", "tests",
    "docs",
}  # fmt: skip
NOT_COMMITTED = {
    ".git", ".venv", ".k3ray", ".mypy_cache", ".ruff_cache", ".hypothesis", ".pytest_cache",
    ".import_linter_cache", "k3ray.egg-info", "shared", "runs", "mlruns", "build", "__pycache__",
}  # fmt: skip


def _modules() -> list[Path]:
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_modules_are_at_most_400_lines() -> None:
    lengths = {_name(p): len(p.read_text(encoding="utf-8").splitlines()) for p in _modules()}
    assert {name: n for name, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def test_functions_are_at_most_60_lines() -> None:
    too_long = {
        f"{_name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in _modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_code_is_ascii() -> None:
    odd = [_name(path) for path in _modules() if not path.read_text(encoding="utf-8").isascii()]
    # Text rules are tested with text of the world.
    assert [name for name in odd if not name.startswith("tests/")] == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        _name(path)
        for path in _modules()
        if path.name != "__init__.py"
        and not path.is_relative_to(ROOT / "tests")
        and ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert silent == []


def test_no_new_top_level_entry() -> None:
    present = {path.name for path in ROOT.iterdir()}
    assert present - TOP_LEVEL - NOT_COMMITTED == set()


def test_tests_are_no_package() -> None:
    assert [_name(path) for path in (ROOT / "tests").rglob("__init__.py")] == []
    assert not (ROOT / "cluster" / "__init__.py").exists()


def test_every_tier_has_tests() -> None:
    tiers = _pyproject()["tool"]["k3ray"]["test-budgets"]
    empty = [tier for tier in tiers if not any((ROOT / "tests" / tier).rglob("test_*.py"))]
    assert empty == []
    assert sum(tier["seconds"] for tier in tiers.values()) <= 25 * 60


def test_no_foreign_kernels_distribution() -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("kernels")


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers_name_exactly_the_packages_that_exist() -> None:
    contracts = _pyproject()["tool"]["importlinter"]["contracts"]
    layers = next(c for c in contracts if c["name"] == "k3ray layers")["layers"]
    listed = {name for line in layers for name in re.split(r"[\s|:]+", line)}
    modules = {path.stem for path in (ROOT / "k3ray").glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "k3ray").glob("*/__init__.py")}
    assert listed == modules | packages


def test_constraints_are_exact_pins_of_every_dependency() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+", line)] == []
    pins = read_pins(ROOT / "constraints.txt")
    assert sorted(set(required_distributions()) - pins.keys()) == []
    assert pins["torch"] == "2.13.0"


def test_decision_records_are_short_and_numbered() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [path.name[:4] for path in records]
    assert len(numbers) == len(set(numbers))
    for path in records:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert re.match(rf"# {path.name[:4]}: ", lines[0]), path.name
        assert len(lines) <= MAX_DECISION_LINES, path.name


def _error_classes(root: type[K3RayError] = K3RayError) -> Iterator[type[K3RayError]]:
    yield root
    for sub in root.__subclasses__():
        yield from _error_classes(sub)


@pytest.mark.parametrize("cls", sorted(set(_error_classes()), key=lambda c: c.__name__))
def test_errors_survive_pickling(cls: type[K3RayError]) -> None:
    error = cls("it failed at x", remedy="do y", peer="group-0#1", deadline_s=1.5)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (again.message, again.remedy) == ("it failed at x", "do y")
    assert again.fields == {"peer": "group-0#1", "deadline_s": 1.5}
    assert str(again) == "it failed at x -> do y"


def test_error_codes_are_unique_and_all_errors_live_in_one_module() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    codes = [cls.code for cls in classes if issubclass(cls, K3RayError)]
    assert len(codes) == len(set(codes))
