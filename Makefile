# Everything runs in $(VENV), with the exact versions of constraints.txt.  `make help` lists the targets.

# Tried in this order; the first that is Python 3.11 or newer makes the virtual environment.
PYTHON ?= python3 python3.13 python3.12 python3.11
VENV ?= .venv
# Passed on as they are: make test PYTEST_ARGS="-k gate -x", make bench BENCH_ARGS="--json".
PYTEST_ARGS ?=
BENCH_ARGS ?= --quick
EXPLORE_ARGS ?= --deep
# Two processes, each test file whole in one of them: most of the suite waits for processes it started.
# In their own order: by default the files of few tests come last, and those are the slow ones.
TEST_WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
RUN_EXTRAS := ray,embedded,bench,data
DEV_EXTRAS := $(RUN_EXTRAS),otel,dev
# What is installed is remembered in a stamp inside the environment, and done again when the pins change.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check
BENCHMARKS := $(strip $(foreach name,embedded lifecycle router weights recovery rollout timeline,\
	$(if $(wildcard benchmarks/$(name).py benchmarks/$(name)/__main__.py),$(name))))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart test check format bench workflows constraints clean \
	test-slow test-sglang test-chaos explore docs audit

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(RUN_STAMP) ## install, then train a tiny model with colocated GRPO on this machine
	$(BIN)/python examples/colocated_grpo.py

test: $(DEV_STAMP) ## install, then run the default test suite
	$(BIN)/python -m pytest $(TEST_WORKERS) $(PYTEST_ARGS)

test-slow: $(DEV_STAMP) ## the tests of whole programs and clusters, which CI runs too
	$(BIN)/python -m pytest $(TEST_WORKERS) -m "slow and not chaos and not sglang" $(PYTEST_ARGS)

test-sglang: $(DEV_STAMP) ## install SGLang for CPUs in the user's cache (2 GB, once), run the suite over it
	$(BIN)/rollout sglang-cpu install
	$(BIN)/python -m pytest -m "sglang and not chaos" $(PYTEST_ARGS)

check: $(DEV_STAMP) ## the gate: format, lint, strict types, import arrow
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_workflows.py

format: $(DEV_STAMP) ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(DEV_STAMP) ## run the benchmarks, quickly; BENCH_ARGS= for real figures
	$(if $(BENCHMARKS),,@echo "make bench: there is no benchmark yet" >&2; exit 2)
	@set -e; for name in $(BENCHMARKS); do \
		echo "== benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name $(BENCH_ARGS); \
	done

test-chaos: $(DEV_STAMP) ## what kills processes for minutes, real SGLang on CPU among them
	$(BIN)/rollout sglang-cpu install
	$(BIN)/python -m pytest -m chaos $(PYTEST_ARGS)

explore: $(DEV_STAMP) ## the long searches of the lifecycle explorer; EXPLORE_ARGS= for the default ones
	$(BIN)/python -m tests.explore $(EXPLORE_ARGS)

workflows: $(DEV_STAMP) ## write .github/workflows/tests.yml anew from its template
	$(BIN)/python .github/workflows/generate.py

docs: $(DOCS_STAMP) ## build the documentation into site/, strictly: a warning or a dead link fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

audit: build/audit/bin/pip-audit ## look the pinned versions up in the database of known vulnerabilities
	$(<D)/python .ci/audit.py $< constraints.txt

clean: ## remove caches and what builds leave; the virtual environment stays
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find rollout engines tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The pins are what an install without them takes today; torch stays, because not every build has a CPU wheel.
constraints: CONSTRAINTS ?= constraints.txt
constraints: TORCH := $(shell sed -n 's/^torch==/&/p' constraints.txt)
constraints: build/pins/bin/python ## take the newest versions that pyproject.toml admits
	$< -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager "$(TORCH)" -e '.[$(DEV_EXTRAS),docs]'
	{ sed -n '/^#/p' constraints.txt; \
	  $< -m pip freeze --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > build/pins/constraints.txt
	cp build/pins/constraints.txt $(CONSTRAINTS)

$(RUN_STAMP): pyproject.toml constraints.txt engines/_bulk.c | $(BIN)/python
	@echo "Installing ray-rollout[$(RUN_EXTRAS)] into $(VENV): a minute or two"
	@$(PIP_INSTALL) -c constraints.txt -e '.[$(RUN_EXTRAS)]'
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt engines/_bulk.c | $(BIN)/python
	@echo "Installing ray-rollout[$(DEV_EXTRAS)] into $(VENV): a minute or two"
	@$(PIP_INSTALL) -c constraints.txt -e '.[$(DEV_EXTRAS)]'
	@touch $@ $(RUN_STAMP)

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ray-rollout[docs] into $(VENV)"
	@$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

build/audit/bin/pip-audit: build/audit/bin/python
	@$< -m pip install -q --disable-pip-version-check pip-audit

# A half-made environment (no ensurepip, say) is not left behind to be taken for a whole one.
$(BIN)/python build/pins/bin/python build/audit/bin/python:
	@for candidate in $(PYTHON); do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "$$candidate -m venv $(@:/bin/python=)"; \
			"$$candidate" -m venv "$(@:/bin/python=)" || { rm -f $@; exit 1; }; \
			exit 0; \
		fi; \
	done; \
	echo "ray-rollout needs Python 3.11 or newer. Tried:" >&2; \
	for candidate in $(PYTHON); do \
		echo "  $$candidate: $$("$$candidate" --version 2>/dev/null || echo 'not found')" >&2; \
	done; \
	echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	exit 1
