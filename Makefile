# `make run` and `make test` need Python 3.10 or newer, git and make; everything else goes into .venv. The targets that
# end in -xla do the same on torch_xla, in .venv-xla (9 GB, because the torch package of that release includes CUDA).
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 5000
XLA_BIN := .venv-xla/bin
DOCS_BIN := .venv-docs/bin
# Test files are run by this many processes: on two cores half of the time of two was waiting. Files start in alphabetical
# order, so that the slow ones come early.
WORKERS ?= 3
PYTEST := -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.10 --no-annotate --quiet --custom-compile-command "make lock"
LOCK := $(COMPILE) pyproject.toml --extra dev
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: run ui test test-all coverage run-xla test-xla docs bench-slow-link lint types lock clean

run: .venv/installed
	$(BIN)/python -m runner

# MLflow's pages for the runs below this folder, whose address it prints; PORT=… sets another port than 5000.
ui: .venv/installed
	$(BIN)/python -m runner.track ui --port $(PORT)

test: lint types
	$(BIN)/python $(PYTEST) -m "not long"

# Needs a browser: Debian's package chromium.
test-all: .venv/installed
	$(BIN)/python $(PYTEST) -m long

# Lines of runner/ and recipes/ that no test reaches in its own process; those of worker processes are not counted.
coverage: .venv/installed
	$(BIN)/python $(PYTEST) -m "not long" --cov=runner --cov=recipes --cov-report=term-missing:skip-covered

run-xla: .venv-xla/installed
	$(XLA_BIN)/python -m runner device=tpu8 sync.k=4

test-xla: .venv-xla/installed
	$(XLA_BIN)/python $(PYTEST) tests/xla

# The documentation as a site, in build/site; a broken link is an error. Its tools are in .venv-docs.
docs: .venv-docs/installed
	$(DOCS_BIN)/mkdocs build --strict

# Two workers and one worker on CoLA or SQuAD, with sync policies for slow links: benchmarks/results/sync-frontier. It takes
# hours, can be stopped at any time and resumes. TASK: cola or squad; TRAIN and DEV: its raw files; MINUTES: start no run
# after that time; OPTIONS: see `python -m benchmarks.sync_frontier run --help`.
.PHONY: bench-sync-frontier
bench-sync-frontier: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.sync_frontier run $(TASK) $(TRAIN) $(DEV) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(OPTIONS)

# One worker at 1/4 to 16 times the reference batch under every scaling rule: benchmarks/results/scaling-rules. It takes hours, can
# be stopped at any time and resumes. TASK: cola, names or squad; TRAIN and DEV: its raw files (names: those of squad);
# MINUTES and OPTIONS as above.
.PHONY: bench-scaling-rules
bench-scaling-rules: .venv/installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.scaling_rules run $(TASK) $(TRAIN) $(DEV) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(OPTIONS)

# Training over a link of 1 Gbit/s between two emulated hosts on this machine. Needs Linux, root, iproute2 and two idle
# cores. TRAIN and DEV: files with CoLA's columns; OPTIONS: see `python -m benchmarks.slow_link --help`.
bench-slow-link: .venv/installed
	$(BIN)/python -m benchmarks.slow_link --train $(TRAIN) --dev $(DEV) $(OPTIONS)

# The same training with the runner, Accelerate, the Trainer and a plain loop, and the machine's limit: benchmarks/results/peers.
# Needs an idle machine for half an hour, can be stopped at any time and resumes. TRAIN and DEV: CoLA's raw files; SQUAD: a
# file in SQuAD's format; MODEL: an encoder's folder, by default MiniLM; MINUTES: start no run after that time;
# OPTIONS: see `python -m benchmarks.peers run --help`.
.PHONY: bench-peers
bench-peers: .venv/installed
	$(BIN)/python -m benchmarks.peers run --train $(TRAIN) --dev $(DEV) --squad $(SQUAD) \
	  $(if $(MODEL),--model $(MODEL)) $(if $(MINUTES),--minutes $(MINUTES)) $(OPTIONS)

# Faults injected into small runs: benchmarks/results/faults. It takes hours, can be stopped at any time and resumes. Needs
# Linux and Debian's package strace; `hosts` needs root and iproute2. EXPERIMENTS: some of `saves kills signals hosts time`,
# of which `time` needs OPTIONS="--train TRAIN --dev DEV"; MINUTES: start no trial after that time.
EXPERIMENTS ?= saves kills signals hosts
.PHONY: bench-faults
bench-faults: .venv/installed
	$(BIN)/python -m benchmarks.faults $(EXPERIMENTS) $(if $(MINUTES),--minutes $(MINUTES)) $(OPTIONS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

# Lock files are for every platform and Python version; pip takes the lines that apply here.
lock: .venv/installed
	$(LOCK) --constraint constraints.in --output-file constraints.txt
	$(LOCK) --constraint constraints-xla.in --extra tpu --output-file constraints-xla.txt
	$(COMPILE) --group pyproject.toml:docs --output-file constraints-docs.txt

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

.venv-xla/installed: pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv .venv-xla
	$(XLA_BIN)/python $(INSTALL) -c constraints-xla.txt -e '.[dev,tpu]'
	touch $@

.venv-docs/installed: pyproject.toml constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	$(DOCS_BIN)/python $(INSTALL) 'pip>=25.1' # knows --group
	$(DOCS_BIN)/python $(INSTALL) -c constraints-docs.txt --group docs
	touch $@

clean:
	rm -rf .venv .venv-xla .venv-docs build outputs
