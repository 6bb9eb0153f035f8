# Everything runs in .venv, which these targets create; a second run installs nothing. `make help` lists them.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: demo test check bench help
# Two pips at once would spoil one environment.
.NOTPARALLEL:

demo: $(VENV)/.core  ## see it work: deliveries repeated, workers killed, every effect once
	$(BIN)/idemp demo $(ARGS)

test: $(VENV)/.test  ## run the tests against real servers, installing those that are missing; ARGS="-k inbox"
	$(BIN)/python -m tests.servers.install
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.test $(VENV)/.check  ## lint, format, types, architecture
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test  ## run the benchmarks
	$(BIN)/python -m tests.servers.install
	$(BIN)/python -m benchmarks $(ARGS)

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.core: pyproject.toml | $(VENV)/.created
	$(PIP) install --editable .
	@touch $@

# `pip install --group` came with pip 25.1.
$(VENV)/.pip: | $(VENV)/.created
	$(PIP) install --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.test $(VENV)/.check: $(VENV)/.%: pyproject.toml | $(VENV)/.pip
	$(PIP) install --editable . --group $*
	@touch $@

$(VENV)/.created:
	@PYTHON='$(PYTHON)' ./.ci/venv '$(VENV)'
	@touch $@
