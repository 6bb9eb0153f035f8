# Everything runs in .venv, which these targets create; a second run installs nothing. `make help` lists them.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Where an environment forbids Python to keep compiled modules, each process would compile idemp and its tests again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: demo test test-slow check bench rivals docs site help
# Two pips at once would spoil one environment.
.NOTPARALLEL:

demo: $(VENV)/.core  ## send duplicates, kill workers, count what is left
	$(BIN)/idemp demo $(ARGS)

test: $(VENV)/.test $(VENV)/.servers  ## test every promise; ARGS="-k inbox" picks
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.test $(VENV)/.spark $(VENV)/.java $(VENV)/.node $(VENV)/.servers $(VENV)/.site $(VENV)/.package $(VENV)/sqlalchemy-2.0  ## the other tests: long and wide ones
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.check  ## lint, format, types, architecture, seeded faults
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports .ci/circles.toml
	$(BIN)/python -m tests.seeded

bench: $(VENV)/.bench  ## consumers side by side; ARGS="--peers", or names
	$(BIN)/python -m benchmarks $(ARGS)

rivals: $(VENV)/.bench  ## kill Celery workers between effect and ack, with five tools
	$(BIN)/python -m benchmarks.kills $(ARGS)

docs: $(VENV)/.test  ## write the pages that come from code or from saved runs
	$(BIN)/python docs/generate.py
	$(BIN)/python -m benchmarks.charts

site: $(VENV)/.site  ## build the site of the documentation in build/site
	rm -rf build/site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/site

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.core: pyproject.toml | $(VENV)/.created
	$(PIP) install --editable .
	@touch $@

# `pip install --group` came with pip 25.1.
$(VENV)/.pip: | $(VENV)/.created
	$(PIP) install --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.test $(VENV)/.check $(VENV)/.spark $(VENV)/.bench $(VENV)/.site $(VENV)/.package: $(VENV)/.%: pyproject.toml | $(VENV)/.pip
	$(PIP) install --editable . --group $*
	@touch $@

$(VENV)/.servers: | $(VENV)/.test
	$(BIN)/python -m tests.servers.install
	@touch $@

# It also records the classes of Spark's JVMs.
$(VENV)/.java: | $(VENV)/.test $(VENV)/.spark
	$(BIN)/python -m tests.servers.install java
	@touch $@

$(VENV)/.node: | $(VENV)/.test
	$(BIN)/python -m tests.servers.install node
	@touch $@

# The oldest release that is supported, beside the newest one.
$(VENV)/sqlalchemy-2.0: | $(VENV)/.test
	$(PIP) install --no-deps --target $@ 'sqlalchemy==2.0.36'

$(VENV)/.created:
	@PYTHON='$(PYTHON)' ./.ci/venv '$(VENV)'
	@touch $@
