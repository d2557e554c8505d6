# Two commands do everything on a fresh machine: `make train` and `make test`. Both work in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint node dashboards bench clean

train: .venv/installed
	$(BIN)/asyncpipe train examples/charlm/charlm.toml

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

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

bench: .venv/installed
	$(BIN)/asyncpipe bench overhead
	$(BIN)/asyncpipe bench pipeline

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info tests/node/node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis runs
