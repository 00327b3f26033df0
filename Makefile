# Every target makes .venv if it is missing. Needs nothing beforehand but Python 3.11 to 3.13, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A dead link or an unknown anchor is an error. The notice is the theme's advertisement of its successor.
SITE   := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
PARTS  := schemas core producers trainer consumers engine gateway cli demo

.PHONY: demo test test-fast chromium conformance chaos lint types bench size docs docs-check constraints check clean
.DEFAULT_GOAL := test

# uv installs torch and its kin in a fifth of pip's time; pip brings uv itself. Compiled once (a minute): where PYTHONDONTWRITEBYTECODE is
# set, as in many containers, every process of every test compiled torch and transformers again, 12 s each.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Headrace needs Python 3.11 to 3.13; $(PYTHON) is `$(PYTHON) -V 2>&1`. Name another: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Headrace into $(VENV) (first time: about 3 GB of packages)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --compile-bytecode -e '.[all]'
	@$(BIN)/python -m compileall -q $(PARTS)
	@touch $@

demo: $(STAMP)
	$(BIN)/headrace demo $(ARGS)

# Three files of tests at a time, which keeps two cores busy, in the order of their names: xdist would leave those with the fewest tests,
# which take longest here, to the end; WORKERS=0 for one after the other, as a debugger needs it.
WORKERS ?= 3
test: $(STAMP) chromium
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# A browser for the tests of the dashboard; without one they are skipped. Their screenshots are in .ci-artifacts/browser.
chromium:
	@tests/browser/chromium.sh

# The hosted services' own clients, unmodified, against Kafka, worker, engine and gateway; part of `make test` too.
conformance: $(STAMP)
	$(BIN)/pytest tests/conformance -s $(ARGS)

test-fast: $(STAMP)
	$(BIN)/pytest -m 'not slow' $(ARGS)

# Every step once, whatever is killed: docs/exactly-once.md. `make chaos ARGS="--steps 1000 --seed 0"` is the long one.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check --no-cache .  # a cached "passed" once hid what a fresh clone failed on
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/docs/words.py

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)

# Files, lines and lines of code by part.
size: $(STAMP)
	$(BIN)/python benchmarks/size.py

# What is generated from the code: JSON Schemas, the AsyncAPI and the OpenAPI document, the reference pages; and the site in build/site.
docs: $(STAMP)
	$(BIN)/headrace docs jsonschema --out schemas/json
	$(BIN)/headrace docs asyncapi --out schemas/asyncapi.yaml
	$(BIN)/headrace docs openapi --out schemas/openapi.json
	$(BIN)/headrace docs reference --out docs/reference
	$(SITE)

docs-check: $(STAMP)
	$(BIN)/headrace docs jsonschema --out schemas/json --check
	$(BIN)/headrace docs asyncapi --out schemas/asyncapi.yaml --check
	$(BIN)/headrace docs openapi --out schemas/openapi.json --check
	$(BIN)/headrace docs reference --out docs/reference --check
	$(SITE)

# Exact versions for every supported Python and platform, from the ranges in pyproject.toml.
constraints: $(STAMP)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
	  --no-header --no-annotate --quiet -o constraints.txt

check: lint types docs-check

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
