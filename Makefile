# Everything a developer runs. All targets set up first; a second set-up takes no time.
# Set-up chatter goes to stderr, so that `make demo ARGS=--json` prints exactly one value on stdout.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Tests start hundreds of processes: each would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

ARGS ?=
TESTS ?=
BIN := .venv/bin
STAMP := .venv/.setup-done
# Of pip, with builds of torch for CUDA; see docs/gpus.md.
TORCH_INDEX ?= https://download.pytorch.org/whl/cu130
GPU_VENV := .venv-gpu/$(notdir $(TORCH_INDEX))
GPU_BIN := $(GPU_VENV)/bin
GPU_STAMP := $(GPU_VENV)/.setup-done

.PHONY: help setup demo check test tests lint docs reference picture compiled bench soak setup-gpu test-gpu bench-gpu gpu-machine

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## system packages and .venv; SYSTEM=no leaves the system alone, PYTHON=... names the interpreter
	@:

$(STAMP): pyproject.toml constraints.txt $(wildcard contrib/setup/*.sh)
	@contrib/setup/system.sh >&2 </dev/null
	@contrib/setup/python.sh .venv >&2 </dev/null
	@touch $@

demo: setup  ## the whole story on a private Slurm on this machine, e.g. make demo ARGS="--json --seconds 60"
	@$(BIN)/fallow demo $(ARGS)

lint: setup  ## ruff, mypy, direction of the layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: setup  ## the documentation as a site in build/docs; strict, needs no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

reference: setup  ## docs/settings.md and docs/commands*.md, from the code
	@$(BIN)/python contrib/docs/reference.py

picture: setup  ## docs/images/top.svg, of fallow top on its made-up cluster
	@$(BIN)/python contrib/docs/picture.py

check: setup  ## lint, types and unit tests, in two minutes; the slowest are shown
	@$(MAKE) -j 2 lint compiled TESTS=tests/unit
	@$(BIN)/pytest -m "not soak" -n 2 --durations=10 tests/unit $(ARGS)

test: setup  ## lint, docs and all tests that need neither a GPU nor patience, e.g. make test ARGS="-k planner", ARGS="-n 0 -s"
	@$(MAKE) compiled
	@$(MAKE) -j 3 lint docs tests

# Two of them wait for Slurm, and tests of the others for leases: with lint and docs beside them two cores are busy.
tests: setup
	@$(BIN)/pytest -m "not soak" -n 5 --durations=20 $(ARGS)

# Where nothing is compiled yet, each of the test processes would compile all tests by itself, and at the same time.
compiled: setup
	@$(BIN)/pytest --collect-only -qq $(TESTS) >/dev/null || true

bench: setup  ## measured figures, e.g. make bench ARGS="pause --members 2,4 --json"
	@$(BIN)/python -m bench $(ARGS)

soak: setup  ## the long tests
	@$(BIN)/pytest -m soak $(ARGS)

setup-gpu: $(GPU_STAMP)  ## .venv-gpu for the next two, with torch from TORCH_INDEX=...; needs no GPU
	@:

test-gpu: gpu-machine $(GPU_STAMP)  ## the tests of the engine on this machine's GPUs
	@FALLOW_TEST_DEVICE=cuda FALLOW_REQUIRE_ACCELERATOR=1 $(GPU_BIN)/pytest tests/gpu $(ARGS)

bench-gpu: gpu-machine $(GPU_STAMP)  ## those tests and the benchmarks on GPUs, in ten minutes, e.g. make bench-gpu ARGS="--out gpu.json"
	@$(GPU_BIN)/python -m bench.gpu $(ARGS)

gpu-machine:
	@contrib/setup/gpu.sh $(GPU_VENV) >&2

$(GPU_STAMP): pyproject.toml constraints.txt $(wildcard contrib/setup/*.sh)
	@TORCH_INDEX=$(TORCH_INDEX) contrib/setup/python.sh $(GPU_VENV) >&2 </dev/null
	@$(GPU_BIN)/python -c 'import sys, torch; torch.backends.cuda.is_built() or sys.exit("$(TORCH_INDEX) gave torch " + torch.__version__ + ", which is not built for GPUs; remove $(GPU_VENV) and name another TORCH_INDEX")'
	@touch $@
