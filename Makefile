# What a developer runs. The environment .venv is made on first use, and again when what defines it changes.
#
#   make demo          train on the built-in digits on two towers, and show what happened
#   make test          all tests                            ARGS="-k staging" is passed to pytest
#   make check         lint, types and all tests
#   make test-oldest   the quick tests on the oldest TensorFlow and Keras that mgpu supports
#   make clean         remove the environments and what tools left
#
# PYTHON=python3.12 chooses the interpreter, JOBS=4 the number of test processes.

SHELL := /bin/bash
VENV := .venv
OLDEST := .venv-oldest
JOBS ?= 2
EPOCHS ?= 16
DEFINES := setup.py pyproject.toml .ci/venv
PYTEST := -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test check lint types format test-oldest clean

demo: $(VENV)/.stamp
	$(VENV)/bin/mgpu train --towers 2 --epochs $(EPOCHS)

test: $(VENV)/.stamp
	$(VENV)/bin/python $(PYTEST) $(ARGS)

check: lint types test

lint: $(VENV)/.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.stamp
	$(VENV)/bin/mypy

format: $(VENV)/.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-oldest: $(OLDEST)/.stamp
	$(OLDEST)/bin/python $(PYTEST) -m "not slow" $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp: $(DEFINES) constraints.txt
	@PYTHON="$(PYTHON)" .ci/venv $(VENV) constraints.txt demo,test,dev 13
	@touch $@

# No linters here: they judge the source, which is the same for both sets.
$(OLDEST)/.stamp: $(DEFINES) constraints-oldest.txt
	@PYTHON="$(PYTHON)" .ci/venv $(OLDEST) constraints-oldest.txt demo,test 12
	@touch $@
