# Everything runs from .venv, which the first target makes by itself from the pinned lock (about 2.7 GB, 2 minutes).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
export OMP_NUM_THREADS := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test test-fast check soak bench docs lock setup clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.ready  ## a run that loses replicas and keeps learning; ARGS="--seed 7 --faults rollout-kill"
	$(BIN)/rolecall demo $(ARGS)

test: $(VENV)/.ready  ## all tests but the long ones, one seed of each end-to-end scenario
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not e2e and not long" --durations=15 $(ARGS)
	$(BIN)/python -m pytest -m e2e --durations=12 $(ARGS)

test-fast: $(VENV)/.ready  ## without engines, Ray or slow tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not e2e and not engine and not long and not slow" $(ARGS)

check: $(VENV)/.ready  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

soak: $(VENV)/.ready  ## ten real seeds of each fault; prints a report and adds to benchmarks/results/
	$(BIN)/python -m pytest -m long
	$(BIN)/python benchmarks/soak.py $(ARGS)

bench: $(VENV)/.ready  ## what watching costs a step
	$(BIN)/python benchmarks/overhead.py $(ARGS)

docs: $(VENV)/.ready  ## the documentation site, into build/docs
	$(BIN)/python -m tools.reference_pages
	$(BIN)/sphinx-build -q -W --keep-going -n -b html docs build/docs

setup: $(VENV)/.ready

$(VENV)/.ready: requirements/linux-cpu.txt pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/setup.sh

lock: $(VENV)/.ready  ## renew requirements/linux-cpu.txt (needs uv)
	uv pip compile --override requirements/linux-cpu.overrides --python-version 3.11 --no-header --no-annotate \
	  $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) requirements/linux-cpu.in -o requirements/linux-cpu.txt

clean:
	rm -rf $(VENV) tools/grafana-schema/node_modules .mypy_cache .ruff_cache .pytest_cache
