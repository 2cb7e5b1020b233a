# make sweep   measure the default grid on this machine
# make test    run the tests, WORKERS at a time
# make bench   run the tests of speed, on a machine that does nothing else
# make check   lint, formatting, types
# make docs    the site, in build/site; a broken link fails
# make gallery the pages of docs/gallery and all pictures, from published results
# Each sets up .venv first. PYTHON chooses the interpreter to make it from: make test PYTHON=python3.12
# Where the dependencies are installed already, no make is needed: python benchmark_sweep.py

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
VERSIONS := -c constraints.txt
# uv installs in a quarter of pip's time, from where pip is configured to look: a mirror, its certificate, wheels.
PLACES := -e 's/.*\.index-url=/UV_DEFAULT_INDEX=/p' -e 's/.*extra-index-url=/UV_EXTRA_INDEX_URL=/p' \
  -e 's/.*find-links=/UV_FIND_LINKS=/p' -e 's/.*\.cert=/SSL_CERT_FILE=/p'
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile $(VERSIONS) uv && \
  eval export UV_INDEX_STRATEGY=unsafe-best-match $$($(BIN)/python -m pip config list | sort -r | sed -n $(PLACES)) && \
  $(BIN)/uv pip install -q --python $(BIN)/python $(VERSIONS) -b constraints.txt -e
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
CHECK := $(VENV)/.check-installed
DOCS := $(VENV)/.docs-installed

.PHONY: sweep test bench check docs gallery
unexport PYTHONDONTWRITEBYTECODE  # containers often set it: every process would compile all of torch's modules anew

sweep: $(RUNTIME)
	$(BIN)/python benchmark_sweep.py $(ARGS)

test: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

bench: $(DEV)
	$(BIN)/python -m pytest -m speed $(ARGS)

check: $(CHECK)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -c docs -d build/doctrees . build/site

gallery: $(DEV)
	$(BIN)/python -m tests.gallery

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[torch,report]'
	touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[torch,report,dev]'
	touch $@ $(RUNTIME)

$(CHECK): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[torch,report,check]'
	touch $@ $(RUNTIME)

$(DOCS): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[torch,report,docs]'
	touch $@ $(RUNTIME)
