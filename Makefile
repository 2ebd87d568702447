# Needs python3 (3.10 or newer, with venv) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Named on the command line beside the package, torch is taken at this very release, where its open range
# ("torch>=2.4") would pull whatever is newest, and gigabytes of CUDA with it.
TORCH := $(shell sed -n 's/^\(torch==.*\)$$/\1/p' constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)

.DELETE_ON_ERROR:  # half a venv would look like a whole one to the next run

.PHONY: help demo test campaign check format schema docs readme bench clean

help:
	@echo 'make demo      install, then watch a run go NaN and be explained'
	@echo 'make test      the tests'
	@echo 'make campaign  the long tests: searches and benchmarks'
	@echo 'make check     ruff, ruff format and mypy'
	@echo 'make format    let ruff mend what it can'
	@echo 'make schema    write schema/ anew from the records'
	@echo 'make docs      write docs/causes.md anew from the list of causes and docs/causes/'
	@echo 'make readme    write the sample report in README.md anew from the demo'
	@echo 'make bench     what watching costs (8 minutes), and the table in README.md anew'
	@echo 'make clean     remove what these commands made'

demo: $(VENV)/.demo
	$(BIN)/nan-detector demo

# Torch builds the tests' small extension with ninja, and looks for that on the PATH.
test campaign: export PATH := $(CURDIR)/$(BIN):$(PATH)

# On every core at once, a file to a core; then, with nothing beside them, those that measure time.
WORKERS ?= auto

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not campaign and not alone"
	$(BIN)/python -m pytest -m "alone and not campaign"

campaign: $(VENV)/.dev
	$(BIN)/python -m pytest -m campaign

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/.dev
	$(BIN)/python -m nan_detector._schema schema/records.schema.json

docs: $(VENV)/.dev
	$(BIN)/python tests/_causes_page.py

readme: $(VENV)/.dev
	$(BIN)/python tests/_readme.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py --readme

# One stamp per set of extras: the install is done once, and again only when what it depends on has changed.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis nan-detector-demo nan-detector-runs nan-detector-bench nan-detector-bench-gpu
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
