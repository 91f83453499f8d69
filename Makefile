# What a developer, a newcomer and CI run. Each target makes .venv by itself when it is missing or out of date.
#
#   make train   launch the example on this machine (two ranks on a CPU, every GPU where there are some)
#   make test    the whole test suite             make lint   style, types, layers, spelling
#   make test-twins  the tests whose subject has native code, on its torch twins; all on the twins: make test DS_NATIVE=0
#   make bench   the benchmarks docs may quote    make docs   write docs/reference/config.md anew from the models
#   make client-suites  the clients' own DeepSpeed tests, from their source distributions (minutes; fetches them)
#   make clean   remove what the tools left; .venv and runs/ stay
#
# PYTHON=python3.12 chooses the interpreter of a new .venv. PIP_ARGS goes to pip, for example
# PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small torch on a machine without GPUs.
# PYTEST_ARGS goes to pytest. WORKERS tests run side by side, but those marked `alone`; WORKERS=0 for one after the other.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
# Files stay whole, for what their tests share, and are begun in the order of `testpaths`.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
BIN := .venv/bin
READY := .venv/.ready

# Optimizers, quantiser, file engine and copies themselves, the tiers, and each ZeRO stage with each optimizer.
TWIN_TESTS := tests/unit/ops tests/unit/offload tests/unit/test_env_report.py tests/ranks/test_optimizers_sharded.py

# A test run starts thousands of processes: without bytecode each would compile our modules anew, and pytest rewrite the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-twins client-suites lint lint-style lint-types lint-layers lint-spelling bench docs clean

train: $(READY)
	$(BIN)/python examples/gpt/run.py

test: export OMP_NUM_THREADS := 1
test: $(READY)
	$(PYTEST)

test-twins: export OMP_NUM_THREADS := 1
test-twins: export DS_NATIVE := 0
test-twins: $(READY)
	$(PYTEST) $(TWIN_TESTS) --ignore tests/unit/ops/device

client-suites: $(READY)
	$(BIN)/python tests/clients/suites/run.py

lint: lint-style lint-types lint-layers lint-spelling

lint-style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

lint-types: $(READY)
	$(BIN)/mypy

lint-layers: $(READY)
	$(BIN)/lint-imports

lint-spelling: $(READY)
	$(BIN)/codespell

bench: $(READY)
	$(BIN)/python benchmarks/run.py

docs: $(READY)
	mkdir -p docs/reference
	$(BIN)/deepspeed-config reference > docs/reference/config.md

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find deepspeed tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt $(shell find csrc -type f)
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"{sys.executable} is Python {v[0]}.{v[1]}; 3.10 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $(READY)
