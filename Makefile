# make demo | test | check: each makes .venv first if it is missing or out of date.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= tiny_qwen_hybrid
# tests at a time; each may be several processes
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
DEMO := runs/demo_$(MODEL)
# the sparse model's prompt is shorter: its reference kernels gather every selected key
DEMO_PROMPT_tiny_qwen_hybrid := 16384
DEMO_PROMPT_tiny_glm_dsa := 2048
DEMO_LR_tiny_qwen_hybrid := 1e-3
DEMO_LR_tiny_glm_dsa := 3e-4

# Every process imports thousands of modules: where bytecode may not be written, each spends 15 seconds on compiling them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-wide test-32 check

help:
	@echo "make setup   .venv with everything that is needed"
	@echo "make demo    GRPO on a 16,384-token prompt on this machine's CPU (MODEL=tiny_qwen_hybrid|tiny_glm_dsa)"
	@echo "make test    every test but those of the next two"
	@echo "make test-wide more layouts of the same kinds"
	@echo "make test-32 the layouts of 32 GPUs, as 32 processes"
	@echo "make check   lint, format, layering"

setup: $(STAMP)

# uv installs in seconds and hard-links from its cache, where pip copies gigabytes.
$(STAMP): setup.py pyproject.toml constraints.txt
	test -x $(BIN)/python || python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	mkdir -p $(DEMO)
	$(BIN)/python examples/make_manual_rollouts.py --prompt-length $(DEMO_PROMPT_$(MODEL)) --response-length 64 \
		--branches 8 --out $(DEMO)/rollouts.jsonl
	OMP_NUM_THREADS=2 $(BIN)/torchrun --nproc-per-node 1 -m longstraw_megatron.train model=$(MODEL) \
		rollouts.path=$(DEMO)/rollouts.jsonl gradient=exact segment_length=1024 branches_per_microbatch=8 \
		optimizer.lr=$(DEMO_LR_$(MODEL)) trainer.max_steps=3 run_dir=$(DEMO)

test: $(STAMP)
	$(PYTEST) --numprocesses $(JOBS) --dist worksteal -m "not ranks32 and not wide" tests

test-wide: $(STAMP)
	$(PYTEST) --numprocesses $(JOBS) --dist worksteal -m wide tests

test-32: $(STAMP)
	$(PYTEST) -m ranks32 tests/mcore/test_32_ranks.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) tests/test_layering.py
