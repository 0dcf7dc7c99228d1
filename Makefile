# `make run` serves a model, `make test` runs the tests; both make what they need first. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The extra `optimum` (torch, 1.4 GB) has an environment of its own, so that all else is tested without it.
VENV_OPTIMUM ?= $(VENV)-optimum
# So has the extra `clients`, whose packages hook into pytest.
VENV_CLIENTS ?= $(VENV)-clients
MODELS ?= models
MODEL ?= qwen2.5-coder-0.5b-instruct
RECIPE ?= int8
PORT ?= 8000
FUZZ_CASES ?= 100000
# pip's progress bars on a terminal, silence elsewhere.
PIP := quiet=; [ -t 1 ] || quiet=--quiet; \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check --constraint constraints.txt
OPTIMUM := $(MAKE) --no-print-directory VENV=$(VENV_OPTIMUM)
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
CLIENTS := $(MAKE) --no-print-directory VENV=$(VENV_CLIENTS)
INSTALLED_CLIENTS := $(VENV)/.installed-clients
INSTALLED_OPTIMUM := $(VENV)/.installed-optimum
PACKAGE := $(MODELS)/$(MODEL)

.DEFAULT_GOAL := help
.PHONY: help run test test-model test-optimum test-clients fuzz check format export quantize serve bench clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(INSTALLED) ## Get a model, export and quantize it, and serve it
	@PATH="$(CURDIR)/$(BIN):$$PATH"; export PATH; exec scripts/run.sh "$(MODELS)" "$(RECIPE)" "$(PORT)"

test: $(INSTALLED_DEV) ## Run the tests (no model needed)
	$(BIN)/python -m pytest

test-model: $(INSTALLED_DEV) ## Run the tests that need the real 0.5B weights, fetching them first
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/prepare_model.sh "$(MODELS)" "$(MODEL)"
	$(BIN)/python -m pytest -m 'model and not optimum and not clients'

test-optimum: ## Run the tests of the extra `optimum`, those on the real weights only if they are there
	@$(OPTIMUM) $(VENV_OPTIMUM)/.installed-optimum
	@only=optimum; ls $(MODELS)/$(MODEL)/checkpoint/*.gguf >/dev/null 2>&1 || only='optimum and not model'; \
	set -x; $(VENV_OPTIMUM)/bin/python -m pytest -m "$$only" tests/optimum

test-clients: ## Run other people's clients (the extra `clients`), against the real weights only if they are there
	@$(CLIENTS) $(VENV_CLIENTS)/.installed-clients
	@only=clients; ls $(PACKAGE)/int8/qwenonnx.json >/dev/null 2>&1 || only='clients and not model'; \
	set -x; $(VENV_CLIENTS)/bin/python -m pytest -m "$$only" tests/server tests/model

fuzz: ## Send FUZZ_CASES made-up requests to the server; an hour or so
	@$(CLIENTS) $(VENV_CLIENTS)/.installed-clients
	QWENONNX_FUZZ_CASES=$(FUZZ_CASES) $(VENV_CLIENTS)/bin/python -m pytest -m 'clients or not clients' \
		tests/server/test_fuzzed_bodies.py tests/server/test_schemathesis.py

check: $(INSTALLED_DEV) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED_DEV) ## Format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

export: $(INSTALLED) ## Export MODEL to an fp32 package
	$(BIN)/qwenonnx export $(MODEL) --models-dir $(MODELS)

quantize: $(INSTALLED) ## Quantize MODEL's fp32 package with RECIPE
	$(BIN)/qwenonnx quantize $(PACKAGE)/fp32 --recipe $(RECIPE)

serve: $(INSTALLED) ## Serve MODEL's RECIPE package on PORT
	$(BIN)/qwenonnx serve $(PACKAGE)/$(RECIPE) --port $(PORT)

bench: $(INSTALLED) ## Measure MODEL's RECIPE package
	$(BIN)/qwenonnx bench $(PACKAGE)/$(RECIPE)

clean: ## Remove the virtual environment and caches (not models/)
	rm -rf $(VENV) $(VENV_OPTIMUM) $(VENV_CLIENTS) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing qwenonnx and what it needs (about 250 MB) from the package index"
	@$(PIP) --editable .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing qwenonnx and the tools for its tests (about 300 MB) from the package index"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(INSTALLED)

$(INSTALLED_CLIENTS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing qwenonnx with LangChain, LiteLLM and schemathesis (about 450 MB) from the package index"
	@$(PIP) --editable '.[dev,clients]'
	@touch $@

$(INSTALLED_OPTIMUM): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing qwenonnx with torch and Optimum (about 1.5 GB) from the package index"
	@$(PIP) --editable '.[dev,optimum]'
	@touch $@
