# `make run` and `make test` need Python 3.10 or newer, git and make; everything else goes into .venv. The targets that
# end in -xla do the same on torch_xla, in .venv-xla (9 GB, since torch's own package of that release brings CUDA along).
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 5000
XLA_BIN := .venv-xla/bin
TEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
XLA_TEST := HF_HUB_OFFLINE=1 $(XLA_BIN)/python -m pytest
LOCK := $(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.10 --no-annotate --quiet \
	--custom-compile-command "make lock"
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: run ui test test-all run-xla test-xla bench-slow-link lint types lock clean

run: .venv/installed
	$(BIN)/python -m runner

# MLflow's pages of the runs below this folder, on http://127.0.0.1:5000; another port with PORT=…
ui: .venv/installed
	$(BIN)/python -m runner.track ui --port $(PORT)

test: lint types
	$(TEST) -m "not long"

# Needs a browser beside Python: Debian's package chromium.
test-all: .venv/installed
	$(TEST) -m long

run-xla: .venv-xla/installed
	$(XLA_BIN)/python -m runner device=tpu8 sync.k=4

test-xla: .venv-xla/installed
	$(XLA_TEST) tests/xla

# Four workers against one on CoLA, every way of synchronising: docs/results/sync-table. Hours in all; it can be
# ended at any time and goes on where it was. TRAIN and DEV: CoLA's raw files; MINUTES: start no run later than that.
.PHONY: bench-sync-table
bench-sync-table: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.sync_table run $(TRAIN) $(DEV) $(if $(MINUTES),--minutes $(MINUTES))

# Training over a link of 1 Gbit/s between two hosts on this machine. Linux, as root, with iproute2 and two idle cores;
# TRAIN and DEV are files with CoLA's columns, and OPTIONS are its own: --help says which.
bench-slow-link: .venv/installed
	$(BIN)/python -m benchmarks.slow_link --train $(TRAIN) --dev $(DEV) $(OPTIONS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

# Locks are for every platform and Python version; pip picks the lines that apply here.
lock: .venv/installed
	$(LOCK) --constraint constraints.in --output-file constraints.txt
	$(LOCK) --constraint constraints-xla.in --extra tpu --output-file constraints-xla.txt

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

.venv-xla/installed: pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv .venv-xla
	$(XLA_BIN)/python $(INSTALL) -c constraints-xla.txt -e '.[dev,tpu]'
	touch $@

clean:
	rm -rf .venv .venv-xla outputs
