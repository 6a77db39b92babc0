# Two commands for a new user: `make demo` and `make test`. Both work a second time without downloading again.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# PyTorch first: on an index of CPU builds this pin is one, where the open range of pyproject.toml may fetch a build for
# GPUs of several GB. Elsewhere give yours: make test TORCH='torch --index-url ...'
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# Threads that spin or fight for two busy cores make small matrix products many times slower.
TESTENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

.PHONY: demo test lint build clean

demo: $(VENV)/.demo
	@echo "== ilse demo: about two minutes on two cores"
	$(BIN)/ilse demo

test: $(VENV)/.test
	@echo "== The whole test suite: about five minutes on two cores"
	$(TESTENV) $(BIN)/python -m pytest

lint: $(VENV)/.dev
	@echo "== ruff and mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

build: $(VENV)/.dev
	@echo "== Wheel and sdist"
	$(BIN)/python -m build

$(VENV)/.torch:
	@echo "== A virtual environment in $(VENV), and PyTorch in it (once, about a minute)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "== Installing ilse-embed with the extra '$*' (once, about a minute)"
	$(PIP) -e '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
