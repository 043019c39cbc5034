# Everything that a person types. Each target makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

NATIVE := hw/native
NATIVE_SOURCES := $(wildcard $(NATIVE)/shim/*.cpp $(NATIVE)/emulator/*.cpp $(NATIVE)/stress/*.cpp)
NATIVE_HEADERS := $(wildcard $(NATIVE)/*/*.h $(NATIVE)/*/*.hpp $(NATIVE)/include/calrt/*.hpp)
COMMA := ,
STRESS_LOOPS ?= 1000
TRACE ?= $(firstword $(wildcard ../*/traces/AzureLLMInferenceTrace_conv.csv))
STRESS_SEED ?= 1
# ThreadSanitizer of an older compiler cannot live with much randomisation of the address space.
SAME_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: plan native test check fuzz parity sanitize soak bench bench-hw wheels notebooks format clean help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,notebooks]'
	@echo "compiling the twin (once, about half a minute)"
	@$(BIN)/python -m sim.fast
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

## make parity     5,000 random scenarios: the compiled twin and the executor, the same tables (minutes)
parity: $(INSTALLED)
	CALTRIO_PARITY_EXAMPLES=5000 $(BIN)/python -m pytest tests/sim/test_parity.py --timeout 3600

## make sanitize   shim and emulator under ThreadSanitizer and AddressSanitizer/UBSan, 1,000 loops
sanitize: out/sanitize/thread/run out/sanitize/address/run
	TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 $$TSAN_OPTIONS" \
	  $(SAME_ADDRESSES) out/sanitize/thread/run $(STRESS_LOOPS) $(STRESS_SEED)
	ASAN_OPTIONS="detect_leaks=1 detect_stack_use_after_return=1 $$ASAN_OPTIONS" \
	  UBSAN_OPTIONS="print_stacktrace=1 $$UBSAN_OPTIONS" \
	  out/sanitize/address/run $(STRESS_LOOPS) $(STRESS_SEED)

define sanitized
out/sanitize/$(1)/%.o: $(NATIVE)/%.cpp $(NATIVE_HEADERS)
	@mkdir -p $$(@D)
	$(CXX) -std=c++17 -O1 -g -fno-var-tracking -fno-omit-frame-pointer -pthread -Wall -Wextra \
	  $(2) -I$(NATIVE)/include -c -o $$@ $$<
out/sanitize/$(1)/run: $(NATIVE_SOURCES:$(NATIVE)/%.cpp=out/sanitize/$(1)/%.o)
	$(CXX) -pthread $(2) -o $$@ $$^
endef
$(eval $(call sanitized,thread,-fsanitize=thread))
$(eval $(call sanitized,address,-fsanitize=address$(COMMA)undefined -fno-sanitize-recover=all))

## make soak       24 simulated hours with random cancels and faults (some minutes)
soak: $(INSTALLED)
	$(BIN)/caltrio soak --hours 24 --device sim --seed 1

## make bench      speed of the twin and of the executor in the loop, logits, idle CPU, memory
##                 (TRACE=file.csv: a request trace; the Azure conversation trace where it is at hand)
bench: $(INSTALLED)
	$(BIN)/python benchmarks/twin.py $(if $(TRACE),--trace $(TRACE))
	$(BIN)/python benchmarks/executor_loop.py
	$(BIN)/python benchmarks/logits.py
	$(BIN)/python benchmarks/idle.py
	$(BIN)/python benchmarks/memory.py

## make bench-hw   what driving a device costs; the emulated card against the simulated one (minutes)
bench-hw: native
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/driver.py
	$(BIN)/python benchmarks/agreement.py

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
