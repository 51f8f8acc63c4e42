# `make run` and `make test` need Python 3.10 or newer, git and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
TEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.PHONY: run test test-all lint types lock clean

run: .venv/installed
	$(BIN)/python -m runner

test: lint types
	$(TEST) -m "not long"

test-all: .venv/installed
	$(TEST) -m long

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

# constraints.txt is for every platform and Python version; pip picks the lines that apply here.
lock: .venv/installed
	$(BIN)/uv pip compile pyproject.toml --constraint constraints.in --extra dev --universal --python-version 3.10 \
		--no-annotate --quiet --custom-compile-command "make lock" --output-file constraints.txt

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv outputs
