# make demo    set up and run the demonstration: no GPU, no SGLang needed
# make test    set up and run everything that CI runs, real SGLang servers included
# make quick   the same without the tests that need a real server
# make canary  check that the exhaustive search finds a planner that is wrong on purpose, drawn by the commit
# make docs    write the generated pages of docs/ and the README's diagram anew
# make clean   remove the virtual environment and what tools left behind

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Set-up is done once for each content of pyproject.toml.
KEY := $(shell cksum < pyproject.toml | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed-$(KEY)
INSTALLED_DEV := $(VENV)/.installed-dev-$(KEY)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

.PHONY: help demo test quick checks canary docs clean

help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(INSTALLED)
	$(BIN)/refitfsm demo --servers 4 --cycles 5

test: checks canary
	$(BIN)/python tests/real/environment.py
	$(PYTEST)

quick: checks canary
	$(PYTEST) -m "not real"

checks: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=docs $(BIN)/mypy -m generate

canary: $(INSTALLED)
	$(BIN)/refitfsm check --canary "$$(git rev-parse HEAD 2>/dev/null || date --iso-8601)"

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(INSTALLED_DEV): $(INSTALLED)
	@echo "setting up: development tools"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(INSTALLED): | $(BIN)/python
	@echo "setting up: refitfsm in $(VENV)"
	@$(PIP) --editable .
	@touch $@

# The first interpreter that runs and is new enough.
$(BIN)/python:
	@for python in $(PYTHON) python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "setting up: $(VENV) with $$($$python --version)"; \
	        $$python -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); exit 1; \
	    fi; \
	done; \
	echo "refitfsm needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
	exit 1
