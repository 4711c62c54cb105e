# Every target works on a fresh machine with Python 3.11+, make and a C/C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup demo demo-scale test test-long lint types contracts bench docs clean

setup: .venv/.done

.venv/.done: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing kvatlas into .venv ..."
	@$(BIN)/pip install -q -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/kvatlas demo

demo-scale: setup
	@$(BIN)/kvatlas demo --scale

lint: setup
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/ruff format --check src tests benchmarks

types: setup
	@$(BIN)/mypy

contracts: setup
	@$(BIN)/lint-imports

test: lint types contracts
	@$(BIN)/pytest -m 'not long'

test-long: setup
	@$(BIN)/pytest -m long

bench: setup
	@$(BIN)/python -m benchmarks

docs: setup
	@$(BIN)/pip install -q -e '.[docs]'
	@$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-* .demo build dist site
