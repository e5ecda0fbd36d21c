# The runners of k3ray: quickstart, test, lint, bench. Everything else is `k3ray --help`.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
BIN := .venv/bin

# The stamp's name is a digest of what decides the installation, so that an unchanged checkout
# never asks the network and a changed pin always installs.
INSTALL_KEY := $(shell $(PYTHON) -c 'import hashlib, json, tomllib; \
  project = tomllib.load(open("pyproject.toml", "rb")); \
  parts = [project["build-system"], project["project"], open("constraints.txt").read()]; \
  print(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16])' 2>/dev/null)
STAMP := .venv/.installed-$(INSTALL_KEY)

.PHONY: help install quickstart test lint format docs bench

help:
	@echo "make quickstart [ONCE=1]  install, then curate, train, serve, kill and recover, live"
	@echo "make test                 install, then every tier of tests"
	@echo "make lint                 ruff, mypy --strict, import contracts"
	@echo "make bench, bench-NAME    benchmarks (rows are appended to tests/bench/results)"

install:
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
	  echo "error: $(PYTHON) is not Python 3.11; name one: make install PYTHON=/path/to/python3.11" >&2
	  exit 2
	fi
	if [ -e "$(STAMP)" ]; then exit 0; fi
	started=$$SECONDS
	( while sleep 4; do echo "installing, $$((SECONDS - started)) s"; done ) & beat=$$!
	trap 'kill $$beat 2>/dev/null || true' EXIT
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	rm -f .venv/.installed-*
	touch "$(STAMP)"
	echo "installed in $$((SECONDS - started)) s"

quickstart: install
	@ONCE="$(ONCE)" $(BIN)/python -m k3ray.cli.quickstart

test: install
	@$(BIN)/python tests/support/run_tiers.py $(TIERS)

lint: install
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	@$(BIN)/python -c 'from pathlib import Path; from k3ray.obs.metric_table import markdown_table; \
	  Path("docs/metrics.md").write_text(markdown_table(), encoding="utf-8")'

bench: install
	@for script in tests/bench/bench_*.py; do
	  echo "== $$script"
	  PYTHONPATH=.:tests/support $(BIN)/python "$$script"
	done

bench-%: install
	@PYTHONPATH=.:tests/support $(BIN)/python tests/bench/bench_$*.py $(ARGS)
