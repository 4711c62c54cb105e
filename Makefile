# Every target works on a fresh machine with Python 3.11+, make and a C/C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup demo demo-scale test test-long engines browser pictures lint format types contracts bench proof-router docs clean

help:        ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/' | expand -t 14

setup: .venv/.done  ## .venv with kvatlas and what its development needs

.venv/.done: pyproject.toml setup.py $(wildcard src/kvatlas/*/*.cpp src/kvatlas/*/*.h)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing kvatlas into .venv ..."
	@$(BIN)/pip install -q -e '.[dev]'
	@# xds-protos puts an old copy of OpenTelemetry's messages over theirs.
	@$(BIN)/pip install -q --force-reinstall --no-deps opentelemetry-proto
	@touch $@

demo: setup  ## round robin against kvatlas on two real vLLM engines on this CPU
	@$(BIN)/kvatlas demo

demo-scale: setup  ## the same on sixteen stub engines, nothing to download
	@$(BIN)/kvatlas demo --scale

lint: setup  ## ruff: rules and format
	@$(BIN)/ruff check src tests benchmarks setup.py
	@$(BIN)/ruff format --check src tests benchmarks setup.py

format: setup  ## ruff: mend what can be mended
	@$(BIN)/ruff check -q --fix src tests benchmarks
	@$(BIN)/ruff format src tests benchmarks

types: setup  ## mypy, strict
	@$(BIN)/mypy

contracts: setup  ## who may import whom
	@$(BIN)/lint-imports

engines: setup  ## vLLM and SGLang for CPU, each in its own .venv-*; stores, Envoy
	@$(BIN)/python tests/engines/install.py vllm nixl mooncake sglang sglang-mooncake stores envoy

browser: setup  ## Chromium and what drives it, for the tests of the page
	@$(BIN)/python tests/engines/install.py browser

pictures: browser  ## the pictures of the page in the documentation
	@$(BIN)/python docs/pictures/page.py

test: lint types contracts  ## all checks: then the tests, then the tests on real engines
	@$(MAKE) --no-print-directory browser || echo "without a browser the tests of the page skip"
	@$(BIN)/python tests/engines/install.py promtool || echo "without promtool the tests of alerts skip"
	@$(BIN)/pytest -n 2 --dist loadfile
	@$(MAKE) --no-print-directory engines
	@$(BIN)/pytest -m 'engine and not long' -n 2 --dist loadfile

test-long: engines  ## what takes too long for every change
	@$(BIN)/pytest -m long

bench: setup  ## the figures of docs/benchmarks.md, as ratios in one run
	@$(BIN)/python -m benchmarks

proof-router: setup  ## policies × families in the simulator, into benchmarks/results/router.json
	@$(BIN)/python -m benchmarks router

docs: setup  ## the documentation, into site/
	@$(BIN)/pip install -q -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove all that the other targets made
	rm -rf .venv .venv-* .demo build dist site
