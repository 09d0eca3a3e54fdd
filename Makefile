# Every target works alone on a fresh clone: it creates .venv and installs what it needs first.
# A stamp file per set of extras makes the second call instant.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TORCH := torch==2.13.0
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
SERVE_ARGS ?=
PYTEST_ARGS ?=
PEERS_ARGS ?=
# Test processes. Two are what the smallest machine has; each of them uses one thread.
JOBS ?= 2

# The first interpreter that runs, is recent enough and can make a virtual environment. A name on PATH
# is not enough: a version manager leaves launchers there for interpreters that are not active.
PYTHON ?= $(shell for p in python3.11 /usr/bin/python3.11 python3.12 python3.13 python3; do \
	if $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)

# The tests compare bits: one thread per process keeps two workers from fighting for the cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: help
help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo 'Milepost needs Python 3.11 or newer with venv (Debian: apt install python3.11 python3.11-venv).' >&2; exit 1; fi
	@echo "== $(VENV): new virtual environment of $$($(PYTHON) --version) =="
	@$(PYTHON) -m venv $(VENV)

# torch goes in first and stays: constraints.txt repeats the version for every later install.
$(VENV)/.stamp-torch: constraints.txt | $(VENV)/bin/python
	@echo '== torch: the large one, some hundred MB and on some systems more than 2 GB; a minute or several, by the network =='
	@$(PIP) install '$(TORCH)'
	@touch $@

# The package with the extras named in the stamp: make $(VENV)/.stamp-serve, -test, -full, -lint, -bench.
EXTRAS_serve := cpu,server,guided
EXTRAS_test := cpu,server,test
EXTRAS_full := cpu,server,test,otel,fuzz,oracle,redis,mooncake,nixl,router,bench
# An oracle that would bring a training stack along; only files of it are read.
ALONE_full := speculators==0.9.0
EXTRAS_lint := cpu,server,test,lint
EXTRAS_bench := cpu,server,bench
$(VENV)/.stamp-%: pyproject.toml constraints.txt $(VENV)/.stamp-torch
	@echo '== milepost[$(EXTRAS_$*)]: this package and what it needs; about a minute =='
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS_$*)]'
	@$(if $(ALONE_$*),$(PIP) install --no-deps $(ALONE_$*))
	@touch $@

# Native kernels: built where there is a C++ compiler, else the plain-torch kernels serve. NATIVE=0 leaves
# them out. A failed build is reported and stops nothing; `make native` is the strict form.
NATIVE ?= 1
NATIVE_SOURCES := $(shell find native -type f -not -path '*/build/*' -not -name '*.pyc')

.PHONY: native
native: $(VENV)/.stamp-native ## build the native CPU kernels (needs a C++ compiler)
	@:

$(VENV)/.stamp-native: $(NATIVE_SOURCES) | $(VENV)/.stamp-torch
	@echo '== native kernels: compiling, silent for a minute or several (NATIVE=0 leaves them out) =='
	@$(PIP) install --no-deps --force-reinstall ./native
	@touch $@

.PHONY: native-if-possible
native-if-possible: $(VENV)/.stamp-torch
	@if [ '$(NATIVE)' = 0 ]; then :; \
	elif ! command -v "$${CXX:-c++}" >/dev/null; then \
		echo '== no C++ compiler: the slower plain-torch kernels will be used =='; \
	else \
		$(MAKE) --no-print-directory native || echo '== native kernels failed to build (above): plain torch will be used ==' >&2; \
	fi

# Builds that only tests use: with sanitizers, and a self-check program for this and for another CPU.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -g1
KERNEL_CHECK := cmake -DMP_KERNEL_CHECK=ON -DCMAKE_BUILD_TYPE=Release -S native -B
AARCH64 := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	-DCMAKE_EXE_LINKER_FLAGS=-static

.PHONY: native-checks
native-checks: build/asan/.stamp build/check-host/.stamp build/check-aarch64/.stamp ## kernels with sanitizers and for other CPUs, as test-full runs them
	@:

build/asan/.stamp: $(NATIVE_SOURCES) | $(VENV)/.stamp-torch
	@echo '== native kernels with sanitizers =='
	@CXXFLAGS='$(SANITIZE)' LDFLAGS='$(SANITIZE)' $(PIP) install --no-deps --upgrade --target build/asan/site \
		-C build-dir=$(CURDIR)/build/asan/cmake -C cmake.define.MP_OPTIMIZATION=-O1 $(NATIVE_PIP_ARGS) ./native
	@touch $@

build/check-host/.stamp: $(NATIVE_SOURCES)
	@echo '== kernel self-check =='
	@$(KERNEL_CHECK) build/check-host >/dev/null && cmake --build build/check-host --parallel $(JOBS)
	@touch $@

build/check-aarch64/.stamp: $(NATIVE_SOURCES)
	@echo '== kernel self-check for aarch64 =='
	@$(KERNEL_CHECK) build/check-aarch64 $(AARCH64) >/dev/null && cmake --build build/check-aarch64 --parallel $(JOBS)
	@touch $@

.PHONY: native-checks-if-possible
native-checks-if-possible: $(VENV)/.stamp-torch
	@if [ '$(NATIVE)' != 0 ]; then \
		$(MAKE) --no-print-directory --keep-going native-checks \
			|| echo '== not all checks of the kernels could be built (above): their tests will be skipped ==' >&2; \
	fi

.PHONY: serve
serve: $(VENV)/.stamp-serve native-if-possible ## serve the embedded model (or MODEL=dir) on HOST:PORT, 127.0.0.1:8000
	@echo '== starting; it answers once it says "listening on" =='
	$(VENV)/bin/milepost serve $(if $(MODEL),$(MODEL) )--host $(HOST) --port $(PORT)$(if $(SERVE_ARGS), $(SERVE_ARGS))

.PHONY: test
test: $(VENV)/.stamp-test native-if-possible ## the tests, offline, in under ten minutes
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not service and not oracle' $(PYTEST_ARGS)

.PHONY: test-full
test-full: $(VENV)/.stamp-full native-if-possible native-checks-if-possible ## what `make test` leaves out: long simulation, oracles, services
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist worksteal -m 'slow or service or oracle' $(PYTEST_ARGS)

.PHONY: kill-test
kill-test: $(VENV)/.stamp-test native-if-possible ## SIGKILL a server with --persist fifty times, with checks after every restart
	MILEPOST_KILLS=50 $(TEST_ENV) $(PY) -m pytest -s -m slow tests/e2e/test_kill.py $(PYTEST_ARGS)

.PHONY: soak
soak: $(VENV)/.stamp-full native-if-possible ## thirty minutes of eight clients over all tiers with faults
	MILEPOST_SOAK_MINUTES=30 $(TEST_ENV) $(PY) -m pytest -s -m slow tests/e2e/test_soak.py $(PYTEST_ARGS)

# Which changes to a rule of the core would no test notice? docs/mutation.md has the answers.
.PHONY: mutation
mutation: $(VENV)/.stamp-test ## mutation testing of the core; MUTATION_ARGS=core/siblings.py for one module
	$(TEST_ENV) $(PY) tools/mutate.py --json build/mutation.json $(MUTATION_ARGS)

# An environment without torch and numpy, not one that hides them.
.PHONY: test-core
test-core: .venv-core/.stamp ## core, stores and simulator where torch and numpy are not installed
	.venv-core/bin/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not service and not oracle' tests/core tests/sim tests/stores tests/test_torch_free.py $(PYTEST_ARGS)

.venv-core/.stamp: pyproject.toml constraints.txt
	@echo '== .venv-core: base dependencies only =='
	@$(PYTHON) -m venv .venv-core
	@.venv-core/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e '.[test-core]'
	@touch $@

.PHONY: lint
lint: $(VENV)/.stamp-lint ## ruff, format, mypy, import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

.PHONY: format
format: $(VENV)/.stamp-lint ## rewrite the sources in the project's format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: docs
docs: $(VENV)/.stamp-serve ## write the pages that are made from the code
	$(PY) tools/cli_reference.py

.PHONY: bench
bench: $(VENV)/.stamp-bench native-if-possible ## scheduler cost and the ten-turn chat, with numbers of this machine
	$(PY) bench/core.py
	$(PY) bench/multiturn.py

# Other engines get environments of their own under .peers; llama.cpp is compiled there, half an hour on a core.
.PHONY: bench-peers
bench-peers: $(VENV)/.stamp-bench native-if-possible ## compare with llama.cpp, vLLM and transformers; PEERS_ARGS=--quick
	$(PY) bench/peer_install.py
	$(PY) bench/peers.py $(PEERS_ARGS)

.PHONY: clean
clean: ## remove environments and caches
	rm -rf $(VENV) .venv-core .peers build dist native/build src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
