# The contract of this repository. Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
# Extra words for pip, for example: make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# Where the demo writes; running it again reuses what is finished.
DEMO_OUT ?= demo-output
# One process per core, each with one thread; PYTEST_ARGS= runs them one after the other.
PYTEST_ARGS ?= -n auto

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu lint format types bench check clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install the package with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed, this is %d.%d; set PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Run the whole idea on this machine: chats, target, store, drafter, report
	$(BIN)/moa-data demo --out $(DEMO_OUT)

test: $(STAMP) ## Run the tests (offline, a few minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(STAMP) ## Run the slow tests
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-gpu: $(STAMP) ## Run the tests that need an accelerator
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, formatting and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy can't follow the mapping of an editable install, so it gets a link with the package's name.
types: $(STAMP) ## Check types over the packages
	@mkdir -p .mypy_path && ln -sfn .. .mypy_path/moa_data
	MYPYPATH=.mypy_path $(BIN)/mypy -p moa_data

bench: $(STAMP) ## Measure this machine; results go to benchmarks/results
	$(BIN)/python benchmarks/bench_store.py

check: lint types test ## All that continuous integration runs

clean: ## Remove .venv, caches and the demo's output
	rm -rf $(VENV) $(DEMO_OUT) .mypy_path .mypy_cache .pytest_cache .ruff_cache .hypothesis build ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
