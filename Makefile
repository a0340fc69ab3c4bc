# make test        set up an environment and run the tests
# make quickstart  set up, train, encode, search, evaluate and print the table (MODEL and DATA choose what)
# make check       lint, types and tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# For a CPU build of torch name its index: make test TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0
READY := $(VENV)/.ready

.PHONY: test quickstart check lint types wheel clean

# torch goes first: as a dependency it would be resolved to a CUDA build of several gigabytes on some machines.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

test: export HF_HUB_OFFLINE = 1
test: $(READY)
	$(BIN)/python -m pytest

quickstart: $(READY)
	$(BIN)/st-aggretriever quickstart $(if $(MODEL),--model $(MODEL)) $(if $(DATA),--data $(DATA)) --output runs/quickstart $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

wheel: $(READY)
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) build dist runs
