# Two commands do everything on a fresh machine: `make train` and `make test`. Both work in .venv.
# `make train WORKERS=processes` trains the same in worker processes. The model stays in runs/charlm; delete the folder to train anew.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test long lint node dashboards docs bench campaigns soak differential modules architectures padding clipping faults crashes hosts hangs frames equal kill-service kill-store kill-run clients shapes package api free-threaded clean

train: .venv/trains
	$(BIN)/asyncpipe train examples/charlm/charlm.toml --resume runs/charlm $(if $(WORKERS),--workers $(WORKERS))

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# The tests that `make test` skips as long ones.
long: .venv/installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m long

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What some tests need of npm: Grafana's types, and a driver for a browser. Without it they are skipped.
node: tests/node/node_modules/.installed

tests/node/node_modules/.installed: tests/node/package.json
	cd tests/node && npm install --no-package-lock --no-audit --no-fund --loglevel=error
	touch $@

dashboards: .venv/installed
	$(BIN)/python -m dashboards.build

# The documentation as a site, in build/site; without a network.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/installed
	$(BIN)/asyncpipe bench overhead
	$(BIN)/asyncpipe bench pipeline

# Long forms of tests; tests/campaigns/README.md says what each shows. `make soak MINUTES=120` runs one longer.
MINUTES ?= 30
JOBS ?= 1000
EXAMPLES ?= 400
CASES ?= 2000
SEED ?= 1
CAMPAIGN := $(BIN)/python -m pytest

campaigns: soak differential modules faults crashes hosts hangs frames equal kill-service kill-store kill-run clients shapes package api architectures padding clipping

soak: .venv/installed
	$(BIN)/python -m tests.campaigns soak --minutes $(MINUTES)

differential: .venv/installed
	$(BIN)/python -m tests.campaigns differential --cases $(CASES) --seed $(SEED) --minutes $(MINUTES)

modules: .venv/installed
	$(BIN)/python -m tests.campaigns modules --cases 0 --minutes $(MINUTES)

architectures: .venv/installed
	$(BIN)/python -m tests.campaigns architectures --minutes $(MINUTES)

padding: .venv/installed
	$(BIN)/python -m tests.campaigns padding --cases $(CASES) --seed $(SEED)

clipping:
	$(BIN)/python -m tests.campaigns clipping --cases $(CASES) --seed $(SEED)

faults: .venv/installed
	$(BIN)/python -m tests.campaigns faults --cases $(CASES) --seed $(SEED)

equal: .venv/installed
	$(BIN)/python -m tests.campaigns workers --cases $(CASES) --seed $(SEED) --minutes $(MINUTES)

hosts: .venv/installed
	$(BIN)/python -m tests.campaigns hosts --seed $(SEED)

crashes: .venv/installed
	$(BIN)/python -m tests.campaigns crashes --seed $(SEED)

hangs: .venv/installed
	$(BIN)/python -m tests.campaigns hangs --cases $(or $(HANGS),200) --seed $(SEED)

frames: .venv/installed
	$(BIN)/python -m tests.campaigns frames --cases $(CASES) --seed $(SEED)

kill-service: .venv/installed
	ASYNCPIPE_KILLS=$(or $(KILLS),50) $(CAMPAIGN) -m long tests/service/test_service_killed.py

kill-store: .venv/installed
	ASYNCPIPE_KILLS=$(or $(KILLS),1000) $(CAMPAIGN) tests/service/store/test_store_killed.py

kill-run: .venv/installed
	ASYNCPIPE_KILLS=$(or $(KILLS),20) $(CAMPAIGN) -m long tests/cli/test_train.py

package: .venv/installed
	$(BIN)/python -m tests.campaigns packaging $(if $(TORCH),--torch $(TORCH))

shapes: .venv/installed
	ASYNCPIPE_SHAPES=all $(CAMPAIGN) tests/core tests/pipeline/test_gradients.py

clients: .venv/installed
	ASYNCPIPE_JOBS=$(JOBS) $(CAMPAIGN) tests/service/test_many_clients.py

api: .venv/installed
	ASYNCPIPE_SCHEMATHESIS=$(EXAMPLES) $(CAMPAIGN) -m "long or not long" tests/service/http/test_schemathesis.py

# Builds a free-threaded interpreter, and runs there what the suite has on threads; needs no .venv.
free-threaded:
	ROUNDS=$(or $(ROUNDS),20) tests/campaigns/free_threaded.sh

# What `make train` needs, and what tests and checks need besides. pip says what it is at.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.venv/trains: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e '.[cli]'
	touch $@

.venv/installed: .venv/trains
	$(PIP_INSTALL) -e '.[dev]'
	$(BIN)/python tests/support/declare_torchvision.py
	touch $@

clean:
	rm -rf .venv build dist *.egg-info tests/node/node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis runs
