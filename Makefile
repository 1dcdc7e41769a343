# Everything a newcomer types. `make demo` and `make test` do all the set-up on a fresh machine with Python 3.11.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := flotilla services shared
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test check format lint types goldens test-all clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# torch first and exactly, from the constraints file: a looser request resolves to the CUDA build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {v.major}.{v.minor} was found: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch and the project into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet -c constraints.txt $$(grep '^torch==' constraints.txt)
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

install: $(STAMP) ## make .venv with everything; costs nothing the second time

demo: install ## a fleet comes up, a model visibly learns, the result is shown, the fleet goes down (about 2 minutes)
	@$(BIN)/flotilla run examples/arithmetic/experiment.yaml

# Whole fleets run one at a time, some when all else has ended; what has failed runs once more, alone (tests/suite).
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --retry-failed-alone --durations=15

test: install ## the whole test suite (about 15 minutes on two cores)
	@$(PYTEST) -m "not long"

check: install ## format, lint, types, unit and contract tests: passes on every commit
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(PYTEST) -m "not slow and not long" tests/unit tests/contract

format: install ## rewrite the sources in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

test-all: install ## also the long tests, for every night
	@$(PYTEST)

clean: ## remove what was built; runs and prepared models stay
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
