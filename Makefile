# The one place that pins torch. pip takes the CPU build where an index offers it, see CONTRIBUTING.md.
TORCH := torch==2.13.0
# What other people wrote, to try Shardwise on; without what they depend on, which is not used.
OUTSIDE := torchvision==0.28.0 timm==1.0.30 monai==1.6.1 expecttest==0.3.0 einops==0.8.1
DECODERS := diffusers==0.42.1

# A contributor's loop: these take about a minute.
QUICK := tests/geometry tests/plans/test_plan.py tests/cluster/test_schedules.py $(patsubst %,tests/comm/test_%.py,in_process pipeline) \
  $(patsubst %,tests/model/test_%.py,types capture) \
  tests/operators/test_every_operator.py::test_an_operator_split_in_two_equals_one_device

# Half of a test's time is waiting, for workers or timeouts: two processes run tests.
SHARED := -n 2 --no-loadscope-reorder

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup browser train quick test test-deep test-gpu lint format bench outside clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv with everything in it

$(READY): pyproject.toml Makefile hatch_build.py $(wildcard native/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q '$(TORCH)'
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps $(OUTSIDE)
	$(BIN)/python -m pip install -q $(DECODERS)
	@touch $@

train: setup  ## train a small network on two local workers
	$(BIN)/shardwise train

# Workers share the cores of this machine, so each computes with one thread.
quick test test-deep: export OMP_NUM_THREADS := 1

browser:  # for the tests of the report, which are skipped without one
	@command -v chromium chromium-browser >/dev/null || \
	  { test "$$(id -u)" = 0 && apt-get install -y -qq chromium >/dev/null 2>&1; } || \
	  echo "no chromium: tests of the report in a browser are skipped"

quick: setup  ## a minute of tests: geometry, messages, capture, every operator on two ranks
	$(BIN)/python -m pytest -q $(QUICK)

test: setup browser  ## run the tests
	$(BIN)/python -m pytest $(SHARED)

test-deep: setup  ## run the tests, those that take minutes included
	$(BIN)/python -m pytest -m "deep or not deep" $(SHARED)

# With the user's own torch: `make test-gpu PYTHON=python`, where pytest and this package's needs are.
test-gpu:  ## run the tests of GPUs, with the PYTHON that has a torch for them
	PYTHONPATH=src:tests $(PYTHON) -m pytest -q tests/gpu

lint: setup  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## run every benchmark, one after the other, and write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/run.py

outside: setup  ## try Shardwise on PyTorch's own samples and on networks of others: hours
	$(BIN)/python -W ignore benchmarks/outside.py

clean:  ## remove the environment, caches and build outputs
	rm -rf .venv build dist runs .hypothesis .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
