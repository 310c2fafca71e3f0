# Two commands on a fresh machine with Python and make: `make demo` and `make test`. Both use one environment, .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
READY := .venv/.ready
BENCH_READY := .venv/.ready-bench
WORKERS ?= 2

# Our processes are short-lived and many: without compiled files each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint format bench soak lab clean

demo: $(READY)
	@$(BIN)/python scripts/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

soak: $(READY)
	$(BIN)/python -m pytest -m soak -p no:randomly --timeout 3600

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) $(BENCH_READY)
	$(BIN)/python -m tests.benchmarks $(ONLY)

lab: $(READY)
	$(BIN)/jupyter lab notebooks/quickstart.ipynb

clean:
	rm -rf .venv out dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# torch is a step of its own: with it in place, no later step of pip looks for another build.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo 'Python cannot make a virtual environment here. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Setting up .venv (once; a few minutes)'
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[demo,dev]'
	@touch $@

$(BENCH_READY): $(READY)
	@$(PIP) --editable '.[bench]'
	@touch $@
