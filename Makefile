# Everything a newcomer needs: `make build`, `make test`. Each target does its own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNEL := $(wildcard src/nsquark/kernel/*.py)
WORKERS ?= 2

.PHONY: build test lint bench crash soak clean

build: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(KERNEL)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools cython
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[test,lint]'
	touch $@

# In two processes; WORKERS=0 runs all in one, where a debugger works.
test: build
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# PEER_NSQD=<path of another nsqd> measures it in the same run and prints ratios.
bench: build
	$(BIN)/python -m benchmarks $(ARGS)

# Twenty rounds of kill -9 under load, with a verdict on every message.
crash: build
	$(BIN)/python -m tests.faults.crash_rounds --rounds 20 $(ARGS)

# The long forms of the tests of bounded memory.
soak: build
	$(BIN)/python -m pytest tests/faults -m long -s $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/nsquark/kernel/*.so src/nsquark/kernel/*.c
