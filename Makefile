# Every target makes what it needs: a .venv from the system's Python, then the packages of
# constraints.txt. Useful variables:
#   PYTHON=python3.12         the interpreter that .venv is made from
#   CONSTRAINTS=oldest.txt    other pins; empty for the newest releases
#   ARGS="--epochs 2"         flags for `ddpo-lessons demo` or pytest
#   GPU_PYTHON=python3.12     what `make gpu` runs in: an environment that is there already
CONSTRAINTS ?= constraints.txt
# On Windows: GNU make and the shell of Git for Windows.
ifeq ($(OS),Windows_NT)
PYTHON ?= python
BIN := .venv/Scripts
else
PYTHON ?= python3
BIN := .venv/bin
endif
PIP_INSTALL := $(BIN)/python -m pip install --no-compile $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=300
# Two processes of one thread each. A file stays in one of them, because the cells of a notebook share a
# kernel and the tests of a file their fixtures; tests/conftest.py puts the long files first.
# ARGS="-n 0" runs everything in one process.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Packages are installed without bytecode, which halves the waiting; what a program imports is
# compiled the first time, unless this variable forbids it.
export PYTHONDONTWRITEBYTECODE =

GPU_PYTHON ?= python3
GPU_NEEDS := torch diffusers transformers peft accelerate safetensors filelock numpy PIL sklearn matplotlib
GPU_NEEDS += tqdm tyro pytest pytest_timeout xdist IPython

.PHONY: help demo test check mutate torture gpu lab notebooks colab site lint clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "make %-10s %s\n", $$1, $$2 }'

demo: .venv/core.stamp ## teach img2img to find an animal in confetti
	$(BIN)/ddpo-lessons demo $(ARGS)

test check: export OMP_NUM_THREADS = 1
# The kernels of the lessons are on a machine with a GPU, which is made up: lessons stay on the CPU.
test: export PYTHONSTARTUP = $(CURDIR)/tests/kernel_on_gpu.py

test: lint ## lint, types, unit tests and every notebook
	$(PYTEST) tests $(if $(NOTEBOOKS),$(NBVAL) $(NOTEBOOKS)) $(ARGS)

check: lint ## the same in two minutes, without the slow tests and the notebooks
	$(PYTEST) -p no:nbval tests -m "not slow" $(ARGS)

mutate: .venv/all.stamp ## put faults into a copy of the package, one at a time: tests must catch each
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations

torture: .venv/all.stamp ## attack runs: kills, full disks, damaged files, wrong inputs
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.torture $(ARGS)

gpu: ## tests, lessons, demo and epochs of large models on a CUDA machine, without a network: about 45 minutes at most
	@$(GPU_PYTHON) -c "import sys; from importlib.util import find_spec; \
	  gone = ', '.join(name for name in '$(GPU_NEEDS)'.split() if find_spec(name) is None); \
	  gone and sys.exit('$(GPU_PYTHON) lacks ' + gone + ': docs/howto/your-card.md says how to bring wheels')"
	@$(GPU_PYTHON) -m benchmarks.speed.gpu $(ARGS)

lint: .venv/all.stamp ## ruff (lint and format) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

lab: .venv/all.stamp ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --LabApp.default_url=lab/tree/notebooks/01_batching.ipynb

notebooks: .venv/all.stamp ## execute every notebook in place
	$(if $(NOTEBOOKS),$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False $(NOTEBOOKS))
	$(if $(NOTEBOOKS),$(BIN)/jupyter nbconvert --to notebook --inplace --coalesce-streams $(NOTEBOOKS))
	$(if $(NOTEBOOKS),$(BIN)/python tests/tidy_notebooks.py $(NOTEBOOKS))

colab: .venv/all.stamp ## lessons that carry their figures, and the package's wheel: to upload
	rm -rf build/colab
	$(BIN)/python images/inline.py build/colab
	$(BIN)/python -m pip wheel --no-deps -w build/colab .
	@echo "Upload a lesson of build/colab, and beside it build/colab/*.whl"

site: .venv/all.stamp ## the pages in build/site, from docs/ and the notebooks as they are
	$(BIN)/python -m sphinx -W --keep-going -q -E -a -c docs -d build/doctrees . build/site
	@echo "Open build/site/index.html; its search shows excerpts only by way of"
	@echo "$(BIN)/python -m http.server -d build/site"

clean: ## remove the environment, caches and build folders
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/core.stamp: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('ddpo-lessons needs Python 3.11 or newer, and this is ' + sys.version.split()[0] + '. Name another interpreter: make PYTHON=python3.12')"
	@echo "[1/2] Making the environment .venv"
	@$(PYTHON) -m venv .venv
	@echo "[2/2] Installing torch, diffusers and what they need (once; a minute or more)"
	@$(PIP_INSTALL) -e .
	@touch $@

.venv/all.stamp: .venv/core.stamp
	@echo "[+] Installing what tests, notebooks and site need (once; half a minute or more)"
	@$(PIP_INSTALL) -e ".[notebooks,site,test]"
	@touch $@
