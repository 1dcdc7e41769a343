# Everything a newcomer types. `make demo` and `make test` do all the set-up on a fresh machine with Python 3.11.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := flotilla services shared
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A fleet is a dozen processes: they share what the first of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.installed
TINKER := .venv-tinker
TINKER_STAMP := $(TINKER)/.installed
NEMO_GYM := .venv-nemo-gym
NEMO_GYM_STAMP := $(NEMO_GYM)/.installed
TASKSETS := .venv-tasksets
TASKSETS_STAMP := $(TASKSETS)/.installed
# NeMo Gym needs Python 3.12.
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12)
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

.PHONY: help install demo docs page test test-sglang test-vllm test-slurm test-netns test-tinker test-environments test-modal nemo-gym style check format coverage test-all lock audit release clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Most of what is installed is never imported, and pip compiles all of it on one core. What a fleet imports is compiled here, once
# and on two: half a dozen processes that start together would each compile the same.
IMPORTED_BY_SERVICES := flotilla.services.gateway.__main__, flotilla.services.rollout.__main__, flotilla.services.reward.__main__, \
	flotilla.services.sandbox.__main__, flotilla.services.trainer.__main__, flotilla.cli.commands.run, matplotlib.backends.backend_agg, matplotlib.figure
IMPORTED_WITH_TORCH := torch, flotilla.services.trainer.worker.__main__, flotilla.services.rollout.engines.process.in_process, \
	flotilla.shared.weights.group.member, examples.arithmetic.building

# torch first and exactly, from the constraints file: a looser request resolves to the CUDA build, and hashes differ by build.
# Everything else is what requirements.lock names, byte by byte.
$(STAMP): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {v.major}.{v.minor} was found: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch and the project into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet --no-compile -c constraints.txt $$(grep '^torch==' constraints.txt)
	@$(BIN)/pip install --quiet --no-compile --no-deps --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -c "import $(IMPORTED_BY_SERVICES)" & $(BIN)/python -c "import $(IMPORTED_WITH_TORCH)"; wait
	@touch $(STAMP)

install: $(STAMP) ## make .venv with everything; costs nothing the second time

demo: install ## a fleet comes up, a model visibly learns, the result is shown, the fleet goes down (about a minute)
	@$(BIN)/flotilla run examples/arithmetic/experiment.yaml --fresh

# The builder is the extra `docs`, alone: its version is in pyproject.toml.
docs: install ## build the documentation as a site that needs no network: build/docs/site/index.html
	@$(BIN)/python -c 'import zensical' 2>/dev/null || $(BIN)/pip install --quiet "$$(sed -n 's/^docs = \["\(.*\)"\]/\1/p' pyproject.toml)"
	@$(BIN)/python -m docs.site.build

# What it writes is kept in services/gateway/page/static, so nobody else needs node; a test compares it with its source.
page: install ## build the gateway's page from page/src into the package; needs node 20 and npm
	@cd page && npm ci --no-audit --no-fund --silent
	@$(BIN)/python page/openapi.py > page/openapi.json && cd page && npx openapi-typescript openapi.json --output src/openapi.ts > /dev/null; rm -f openapi.json
	@cd page && npx tsc && node build.mjs

# Whole fleets run beside other files, on half of the workers; what has failed runs once more, alone (tests/suite).
# Five workers on two cores: two of them run fleets, which wait for leases and deadlines a third of the time, and so do services.
PYTEST := $(BIN)/python -m pytest -q -n 5 --dist loadfile --retry-failed-alone --durations=15

# LONG_SLOT=commit adds one of five slots of the rotating long tests, chosen by the commit's number; LONG_SLOT=N that one.
test: install ## the whole test suite (about 15 minutes on two cores); CI adds LONG_SLOT=commit, a fifth of the rotating long tests
	@$(PYTEST) $(if $(LONG_SLOT),-m "not sglang and not vllm and not slurm and not netns and not tinker" --long-slot $(LONG_SLOT),-m "not long and not sglang and not vllm and not slurm and not netns and not tinker")

# Engines bring packages of their own versions: they never meet ours. What is pinned is in flotilla/pinned_engines.py.
$(SGLANG_STAMP): | $(STAMP)
	@$(BIN)/flotilla engine install sglang --device cpu --path $(SGLANG)
	@touch $(SGLANG_STAMP)

$(TINKER_STAMP): | $(STAMP)
	@$(PYTHON) -m venv $(TINKER) && $(TINKER)/bin/pip install -q -c constraints.txt $$(grep '^torch==' constraints.txt) numpy
	@$(TINKER)/bin/pip install -q -c constraints.txt "tinker==0.38.0" aiohttp blobfile chz cloudpickle datasets math-verify pillow pylatexenc \
		pyrage sympy termcolor tiktoken tqdm
	@$(TINKER)/bin/pip install -q --no-deps "tinker-cookbook==0.6.1"
	@touch $(TINKER_STAMP)

test-tinker: install $(TINKER_STAMP) ## tests of the Tinker API with its real client (SDK 0.38), in an environment of its own
	@FLOTILLA_TINKER_PYTHON=$(CURDIR)/$(TINKER)/bin/python $(BIN)/python -m pytest -q --durations=10 -m tinker tests

# What a resources server imports, and not what else the package brings: mlflow, datasets, tools of the command line.
$(NEMO_GYM_STAMP):
	@$(PYTHON312) -m venv $(NEMO_GYM) && $(NEMO_GYM)/bin/pip install -q --no-deps "nemo-gym==0.4.0"
	@$(NEMO_GYM)/bin/pip install -q "openai<=2.7.2" "mcp>=1.27,<2" aiohttp fastapi gprof2dot hydra-core itsdangerous omegaconf orjson pandas \
		pydantic pydot "ray>=2.55.1" requests rich typing-extensions uvicorn wandb yappi
	@touch $(NEMO_GYM_STAMP)

nemo-gym: $(NEMO_GYM_STAMP) ## make .venv-nemo-gym: Python 3.12 with what a resources server of NeMo Gym needs

$(TASKSETS_STAMP):
	@$(PYTHON) -m venv $(TASKSETS) && $(TASKSETS)/bin/pip install -q "verifiers==0.4.0"
	@touch $(TASKSETS_STAMP)

test-environments: install $(NEMO_GYM_STAMP) $(TASKSETS_STAMP) ## Harbor tasks, the real NeMo Gym 0.4 and the real verifiers 0.4: episodes, and whole fleets that learn
	@FLOTILLA_NEMO_GYM_PYTHON=$(CURDIR)/$(NEMO_GYM)/bin/python FLOTILLA_TASKSETS_PYTHON=$(CURDIR)/$(TASKSETS)/bin/python \
		$(BIN)/python -m pytest -q --durations=10 tests/integration/gateway/test_harbor.py tests/integration/gateway/test_nemo_gym.py \
		tests/integration/gateway/test_tasksets.py tests/e2e/test_environments.py

test-modal: install ## every contract of the sandbox's providers over Modal's real package, against a server of its stubs
	@$(BIN)/pip install --quiet '.[modal]'
	@$(BIN)/python -m pytest -q --durations=10 -k modal tests/contract/sandbox tests/unit/sandbox/test_settings.py

# All that the tests send is written down; a checker of recorded traffic is asked at the end, where there is one.
SGLANG_CHECKER ?= $(wildcard $(abspath ../shared/tools/sglang_cpu.py))
test-sglang: install $(SGLANG_STAMP) ## tests against a real SGLang 0.5.23 on the CPU, in an environment of its own
	@rm -f $(SGLANG)/traffic.jsonl
	@FLOTILLA_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python FLOTILLA_SGLANG_RECORDS=$(CURDIR)/$(SGLANG)/traffic.jsonl \
		FLOTILLA_SGLANG_CHECKER=$(SGLANG_CHECKER) $(BIN)/python -m pytest -q --durations=10 -m sglang tests

$(VLLM_STAMP): | $(STAMP)
	@$(BIN)/flotilla engine install vllm --device cpu --path $(VLLM)
	@touch $(VLLM_STAMP)

test-vllm: install $(VLLM_STAMP) ## tests against a real vLLM 0.32 on the CPU, in an environment of its own
	@FLOTILLA_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -q --durations=10 -m vllm tests

# Hosts of network namespaces, joined by a switch that is a process: needs root, ip(8) and /dev/net/tun, no kernel modules.
test-netns: install ## three hosts lose each other for 8, 20 and 40 s, either way, and through delay and loss; needs root (half an hour)
	@$(BIN)/python -m pytest -q -s --durations=10 -m netns tests/netns

# Debian's packages: apt-get install slurm-wlm munge. A cluster of one node, as root, in a folder of the test's own.
test-slurm: install ## tests of deploy/slurm under a real Slurm on this machine; needs Debian's slurm-wlm, and root
	@$(BIN)/python -m pytest -q --durations=5 -m slurm tests/slurm

style: install ## format, lint and types, without changing anything
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

check: style ## style, unit and contract tests: passes on every commit
	@$(PYTEST) -m "not slow and not long and not sglang and not vllm and not slurm and not netns and not tinker" tests/unit tests/contract

format: install ## rewrite the sources in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Child processes are measured too; one that is killed writes nothing.
coverage: install ## which lines unit and contract tests run, by module; a figure to look at, not a bound
	@$(BIN)/pip install --quiet 'coverage>=7.10'
	@rm -f .coverage .coverage.*
	@$(BIN)/python -m coverage run -m pytest -q -n 4 --dist loadfile -m "not slow and not long and not sglang and not vllm and not slurm and not netns and not tinker" tests/unit tests/contract || true
	@$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report --skip-covered --sort=cover

test-all: install ## the whole suite and the long tests, for every night
	@$(PYTEST) -m "not sglang and not vllm and not slurm and not netns and not tinker"

# torch, and what its build for GPUs brings along, are left to torch.
lock: install ## resolve pyproject.toml again, and write every version and hash into requirements.lock
	@$(BIN)/pip install --quiet uv
	@set -o pipefail; $(BIN)/uv pip compile --quiet pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		-c constraints.txt --no-emit-package torch --no-annotate --custom-compile-command 'make lock' \
		| awk '/^[a-z]/ {kept = !/^(nvidia-|cuda-|triton=)/} /^#/ || kept' > requirements.lock.new
	@mv requirements.lock.new requirements.lock

audit: install ## look up the locked packages among known vulnerabilities; needs a network
	@$(BIN)/pip install --quiet pip-audit
	@$(BIN)/pip-audit --disable-pip --require-hashes -r requirements.lock

release: install ## build wheel and source distribution into dist/, and try each in an empty folder
	@rm -rf dist && $(BIN)/pip install --quiet 'build>=1.2'
	@$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	@for file in dist/*; do bash .ci/try-installed "$$file" || exit 1; done

clean: ## remove what was built; runs and prepared models stay
	rm -rf .venv .venv-sglang .venv-vllm .venv-tinker build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
