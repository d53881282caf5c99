# `make demo` and `make test` each do their whole job on a machine that has only python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The oldest torch that bitplan supports, and the environment that tests it.
OLDEST_TORCH := 2.11.0
OLDEST_VENV := .venv-oldest
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt src/bitplan/_version.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-distributed test-oldest lint types unit goldens zoo torture wheel-check release bench docs clean

help:
	@echo "make demo         install bitplan into $(VENV), train digits under six plans, and write a page about it"
	@echo "make test         install with the dev extra, then ruff, mypy --strict and every test"
	@echo "make test-distributed  the tests that start several processes (make test has them, too)"
	@echo "make test-oldest  probe private torch and run the goldens on torch $(OLDEST_TORCH), installed into $(OLDEST_VENV)"
	@echo "make goldens      compare every golden run to its stored losses and weights (make test has a sample of them)"
	@echo "make zoo          check foreign models (transformers, timm, torch_geometric) and write docs/zoo.md; an hour on one core"
	@echo "make torture      ten minutes of kills, damaged run folders, fuzzed plans and fuzzed command lines, with counts"
	@echo "make wheel-check  build the wheel, install it into a fresh environment and run it there"
	@echo "make release      build sdist and wheel into dist/ with the links of URL=https://host/owner/bitplan; uploads nothing"
	@echo "make bench        install the peers and measure every number format against them"
	@echo "make docs         install mkdocs-material and build the documentation into site/"
	@echo "make clean        remove $(VENV), caches and what the demo and the documentation wrote"

demo: $(VENV)/.stamp-lab
	@$(BIN)/bitplan demo

test: lint types unit

lint: $(VENV)/.stamp-dev
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }

types: $(VENV)/.stamp-dev
	@echo "== mypy --strict src benchmarks"
	@$(BIN)/mypy --strict src benchmarks

# A process for each core, with one thread each: most tests are small. make unit PYTEST_ARGS="-n 0 tests/plan" has one.
unit: $(VENV)/.stamp-dev
	@echo "== pytest"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

# Part of make test, too; on a machine with GPUs, see docs/how-to/distributed.md.
test-distributed: $(VENV)/.stamp-dev
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 0 -m distributed tests $(PYTEST_ARGS)

# Every case of tests/golden; make.py in that folder says how they were made.
goldens: $(VENV)/.stamp-dev
	@BITPLAN_GOLDENS=all OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal tests/golden $(PYTEST_ARGS)

# Every model of tests/zoo under every check; make test has a sample of them.
zoo: $(VENV)/.stamp-zoo
	@$(BIN)/python tests/zoo/run.py --jobs 2 --out docs/zoo.md $(ZOO_ARGS)

# make torture TORTURE_ARGS="--seconds 60 --seed 7" for another length and seed.
torture: $(VENV)/.stamp-dev
	@OMP_NUM_THREADS=1 $(BIN)/python tests/torture/run.py --seconds 540 $(TORTURE_ARGS)

# The fresh environment takes torch from $(VENV) instead of downloading it again; bitplan itself comes from the wheel.
wheel-check: $(VENV)/.stamp-lab
	@$(PIP_INSTALL) build twine
	@.ci/wheel-check $(BIN)/python

# The files of a checkout name no host; those of a package index need one for their links.
release: $(VENV)/.stamp-base
	@test -n "$(URL)" || { echo "name the repository: make release URL=https://host/owner/bitplan"; exit 2; }
	@$(PIP_INSTALL) build twine
	@$(BIN)/python .ci/release $(URL)

# Goldens are keyed by torch version: without stored ones for this torch they are skipped, with the reason.
test-oldest: $(OLDEST_VENV)/.stamp
	@OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -n auto --maxprocesses 8 -rs tests/compiler/test_torch_private.py tests/golden $(PYTEST_ARGS)

bench: $(VENV)/.stamp-bench
	@$(BIN)/python benchmarks/run.py formats

# Strict: a missing page or a broken link fails (with --quiet it would not). The API reference is made from the source
# without importing it, so neither bitplan nor torch is installed for it.
docs: $(VENV)/.stamp-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

clean:
	@rm -rf $(VENV) $(OLDEST_VENV) build dist site src/*.egg-info bitplan-demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after its installation succeeded, and grows old when what it was made from changes.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit("bitplan needs Python 3.11 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(OLDEST_VENV)/.stamp: $(INPUTS)
	@echo "== creating $(OLDEST_VENV) with torch $(OLDEST_TORCH)"
	@$(PYTHON) -m venv $(OLDEST_VENV)
	@grep -v '^torch' constraints.txt > $(OLDEST_VENV)/constraints.txt
	@$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST_VENV)/constraints.txt torch==$(OLDEST_TORCH) -e . pytest pytest-xdist hypothesis
	@touch $@

$(VENV)/.stamp-base: $(VENV)/.stamp-venv $(INPUTS)
	@echo "== installing bitplan (the first time fetches torch, which takes a while)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-base
	@echo "== installing the dev extra"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.stamp-zoo: $(VENV)/.stamp-dev
	@echo "== installing timm and torch_geometric"
	@$(PIP_INSTALL) -e '.[zoo]'
	@touch $@

$(VENV)/.stamp-lab: $(VENV)/.stamp-base
	@$(PIP_INSTALL) -e '.[lab]'
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-venv constraints.txt
	@echo "== installing mkdocs-material and mkdocstrings"
	@$(PIP_INSTALL) mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-base
	@echo "== installing the peers"
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@
