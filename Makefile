# Everything runs in .venv, which these targets create; a second run installs nothing. `make help` lists them.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# The suite starts hundreds of interpreters: none shall compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: demo test test-slow check bench help
# Two pips at once would spoil one environment.
.NOTPARALLEL:

demo: $(VENV)/.core  ## see it work: deliveries repeated, workers killed, every effect once
	$(BIN)/idemp demo $(ARGS)

test: $(VENV)/.test $(VENV)/.spark  ## test every promise on real servers, installing those that are missing; ARGS="-k inbox"
	$(BIN)/python -m tests.servers.install
	@$(BIN)/python -m idemp.spark.testing.jvm >/dev/null  # once, and not while tests wait for it
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.test $(VENV)/.slow $(VENV)/.spark  ## all other tests: long storms, further isolation levels and servers
	$(BIN)/python -m tests.servers.install --slow
	@$(BIN)/python -m idemp.spark.testing.jvm >/dev/null
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.test $(VENV)/.check $(VENV)/.spark  ## lint, format, types, architecture
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test $(VENV)/.bench  ## run the benchmarks, and write docs/benchmarks
	$(BIN)/python -m tests.servers.install --slow
	$(BIN)/python -m benchmarks $(ARGS)

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.core: pyproject.toml | $(VENV)/.created
	$(PIP) install --editable .
	@touch $@

# `pip install --group` came with pip 25.1.
$(VENV)/.pip: | $(VENV)/.created
	$(PIP) install --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.test $(VENV)/.slow $(VENV)/.check $(VENV)/.bench: $(VENV)/.%: pyproject.toml | $(VENV)/.pip
	$(PIP) install --editable . --group $*
	@touch $@

# Last of all, and not before it says so: everything else works without it.
$(VENV)/.spark: pyproject.toml | $(VENV)/.test
	@$(BIN)/python -c 'import pyspark' 2>/dev/null || echo 'Installing PySpark: 456 MB, about a minute'
	$(PIP) install --editable . --group spark
	@touch $@

$(VENV)/.created:
	@PYTHON='$(PYTHON)' ./.ci/venv '$(VENV)'
	@touch $@
