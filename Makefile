# Everything that a person types. Each target makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: plan test check bench notebooks format clean help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,notebooks]'
	@touch $@

## make plan       verdict per hypothesis, and out/plan/report.html
plan: $(INSTALLED)
	$(BIN)/caltrio plan --force --out out/plan

## make test       all tests
test: $(INSTALLED)
	$(BIN)/python -m pytest

## make check      ruff, mypy --strict
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## make bench      speed of the executor in the loop, and memory of a million steps
bench: $(INSTALLED)
	$(BIN)/python benchmarks/executor_loop.py
	$(BIN)/python benchmarks/memory.py

## make notebooks  execute the notebooks in place
notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

## make format     let ruff mend what it can
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out
