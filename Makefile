# Everything happens in .venv, which each target sets up as far as it needs.
# Wanted on the machine: python3 (with its venv module), make, a C compiler.
#
#   make train                      train a small GPT on real text with two ranks
#   make test                       the whole suite
#   make test PYTEST_ARGS='-k data' some of it
#   make test TORCH=torch==2.11.0   with another release of torch, which stays in .venv

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRAIN_ARGS ?= tiny --nproc-per-node 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help train test test-gpu check lint types layers sizes docs format clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's|^([a-z-]+):.*## (.*)|  make \1\t\2|' | expand -t 18

train: $(VENV)/.ready-train ## Train a small GPT on real text with two ranks
	$(BIN)/gradsync train $(TRAIN_ARGS)

# Hundreds of processes start, each of which would compile what no cache keeps.
unexport PYTHONDONTWRITEBYTECODE
# Three at a time: much of a test is waiting for messages. -n 0 shows output as it comes (-s, --pdb).
test: $(VENV)/.ready-test ## Run the whole test suite
	$(BIN)/python -m pytest -n 3 $(PYTEST_ARGS)

test-gpu: $(VENV)/.ready-test ## Several ranks over NCCL on one GPU; without one it says so and ends
	$(BIN)/python tests/gpu/run.py

check: lint types layers sizes ## Lint, types, layers and sizes

lint: $(VENV)/.ready-lint ## Style and common mistakes (ruff)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.ready-lint ## Types (pyrefly)
	$(BIN)/pyrefly check

layers: $(VENV)/.ready-lint ## Imports go down only (import-linter)
	$(BIN)/lint-imports

sizes: $(VENV)/.ready-lint ## Sizes of files and functions; unsafe calls; turns of phrase
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_safety.py
	$(BIN)/python tools/check_prose.py

docs: $(VENV)/.ready-docs ## The pages as a site, with the reference: build/docs/docs/index.html (Sphinx)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/docs

format: $(VENV)/.ready-lint ## Put the code into the house's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove the environment, caches and build products (runs/ stays)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment: each stamp is newer than what it was made from --------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gradsync needs Python 3.11 or newer; say: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "no venv module: on Debian, apt-get install python3-venv" >&2; exit 1; }

# torch first and alone: what is already there (a CUDA build, say) is kept, whatever else is installed,
# unless the command line says which.
ASKED := $(filter command%,$(origin TORCH))
$(VENV)/.ready-torch: $(if $(ASKED),FORCE) | $(BIN)/python
	@echo 'setting up $(VENV) (the first time takes some minutes)'
	$(PIP) --upgrade 'pip>=25.1'
	$(if $(ASKED),,$(BIN)/python -c 'import torch' 2>/dev/null ||) $(PIP) '$(TORCH)'
	@touch $@

FORCE:

$(VENV)/.ready-train: pyproject.toml $(VENV)/.ready-torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.ready-test: pyproject.toml $(VENV)/.ready-torch
	$(PIP) --editable . --group test
	@touch $@ $(VENV)/.ready-train

$(VENV)/.ready-lint: pyproject.toml $(VENV)/.ready-torch
	$(PIP) --editable . --group lint
	@touch $@ $(VENV)/.ready-train

$(VENV)/.ready-docs: pyproject.toml $(VENV)/.ready-torch
	$(PIP) --editable . --group docs
	@touch $@ $(VENV)/.ready-train
