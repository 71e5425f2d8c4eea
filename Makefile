# Every target sets up what it needs in $(VENV) first; a second call finds it there and costs nothing.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.PHONY: demo test lint docs clean help
.DELETE_ON_ERROR:

demo: $(RUNTIME)  ## train over an emulated slow link, compressed against uncompressed
	$(BIN)/thinwire demo $(ARGS)

test: $(DEV)  ## run the tests; ARGS="-k vote" goes to pytest
	OMP_NUM_THREADS=1 PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest $(ARGS)

lint: $(DEV)  ## ruff (rules, format) and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

docs: $(DEV)  ## write the API pages to site/
	$(BIN)/python -m pdoc --docformat google --output-directory site thinwire

clean:  ## remove what the other targets made; runs/ stays
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The stamps live inside the environment, so deleting it deletes them too, and an interrupted install is repeated.
$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "thinwire: no '$(PYTHON)' on this machine; install Python 3.11 or newer, or say make PYTHON=/path/to/python" >&2; \
	  exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "thinwire: '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1); 3.11 or newer is needed, say make PYTHON=python3.11" >&2; \
	  exit 2; }
	"$(PYTHON)" -m venv $(VENV)

$(RUNTIME): requirements.txt pyproject.toml | $(BIN)/python
	$(PIP) install -r requirements.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(DEV): requirements-dev.txt $(RUNTIME)
	$(PIP) install -r requirements-dev.txt
	@touch $@
