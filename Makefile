SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench clean FORCE

PYTHON ?= python3
BENCH ?= *

# The stamp holds the extra that is installed: chosen once by whether there is a GPU, or by `make setup EXTRA=cpu|gpu`.
READY := .venv/.ready
INSTALLED := $(shell cat $(READY) 2>/dev/null)
EXTRA ?= $(or $(INSTALLED),$(if $(shell command -v nvidia-smi),gpu,cpu))

BIN := .venv/bin
UV_INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
PINS_cpu := --constraints constraints-cpu.txt --excludes excludes-cpu.txt
PINS_gpu := --overrides overrides-gpu.txt
TORCH_CPU := $(UV_INSTALL) --no-deps $(shell grep '^torch==' constraints-cpu.txt)

# Nothing outside the checkout is touched, nothing is reported to anyone, and every process may keep its bytecode: vLLM
# and AutoModel start several times slower without.
export PREFECT_HOME ?= $(CURDIR)/.moltflow/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
unexport PYTHONDONTWRITEBYTECODE

help: ## show this list
	@awk -F ': .*## ' '/^[a-z]+: .*## / {printf "make %-6s %s\n", $$1, $$2}' Makefile

setup: $(READY) $(PREFECT_HOME)/prefect.db ## install into .venv (EXTRA=cpu or gpu forces the kind)

demo: setup ## train a tiny agent on this machine
	$(BIN)/python -m flows.demo

test: setup ## run the tests
	$(BIN)/pytest

check: $(READY) ## lint, types, layers and house rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/tools/house_rules.py

bench: setup ## run tests/bench, or one of it: BENCH=name
	for file in tests/bench/bench_$(BENCH).py; do $(BIN)/python "$$file"; done

clean: ## remove everything that was built, run or cached here
	rm -rf .venv .moltflow build dist recipes/quickstart/build
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An unfinished .venv, or one of the other kind, is built anew. uv does not read pip's settings, where the CPU build of
# torch may be offered; elsewhere it is in PyTorch's own index.
$(READY): pyproject.toml constraints-cpu.txt excludes-cpu.txt overrides-gpu.txt $(if $(filter $(INSTALLED),$(EXTRA)),,FORCE)
	@echo "installing into .venv ($(EXTRA))"
	@$(if $(filter $(INSTALLED),$(EXTRA)),,rm -rf .venv)
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --constraint constraints-cpu.txt uv
	@links="$${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}"; \
	export UV_FIND_LINKS="$${UV_FIND_LINKS:-$$(echo $$links | tr ' ' ',')}"; \
	if [ $(EXTRA) = cpu ]; then $(TORCH_CPU) 2>/dev/null || $(TORCH_CPU) --torch-backend cpu; fi; \
	$(UV_INSTALL) $(PINS_$(EXTRA)) --editable '.[$(EXTRA),dev]'
	@echo $(EXTRA) > $@

# The first server on a new database prints `database is locked` tracebacks.
$(PREFECT_HOME)/prefect.db: | $(READY)
	@mkdir -p $(PREFECT_HOME)
	@$(BIN)/prefect server database upgrade --yes > /dev/null
