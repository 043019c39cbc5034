# Everything that a person types. Each target makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: plan native test check fuzz soak bench wheels notebooks format clean help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,notebooks]'
	@touch $@

## make plan       verdict per hypothesis, and out/plan/report.html
plan: $(INSTALLED)
	$(BIN)/caltrio plan --force --out out/plan

## make native     compile the driver and the emulated card
native: $(INSTALLED)
	$(BIN)/python -m hw.build

## make test       all tests; compiles what has changed, where there is a compiler
test: $(INSTALLED)
	$(BIN)/python -m hw.build --optional
	$(BIN)/python -m pytest

## make check      ruff, mypy --strict
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## make fuzz       2,000 random lives of the executor's core, and 1,000 random faults
fuzz: $(INSTALLED)
	CALTRIO_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest tests/core/test_core_machine.py
	$(BIN)/caltrio faults --random 1000 --seed 1
	$(BIN)/caltrio faults --random 1000 --seed 2 --max-inflight 2

## make soak       24 simulated hours with random cancels and faults (some minutes)
soak: $(INSTALLED)
	$(BIN)/caltrio soak --hours 24 --device sim --seed 1

## make bench      speed of the executor in the loop, logits, idle CPU, memory of a million steps
bench: $(INSTALLED)
	$(BIN)/python benchmarks/executor_loop.py
	$(BIN)/python benchmarks/logits.py
	$(BIN)/python benchmarks/idle.py
	$(BIN)/python benchmarks/memory.py

## make wheels     build wheels with and without a compiler, and use them (two minutes)
wheels: $(INSTALLED)
	PYTHON=$(CURDIR)/$(BIN)/python tests/wheels.sh

## make notebooks  execute the notebooks in place
notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

## make format     let ruff mend what it can
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out
