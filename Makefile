# Needs make and a Python of at least 3.11; each target sets up the rest in .venv by itself.
#
#   make demo     see it work, on short texts that come with it   (make demo MODEL=path/to/a/model)
#   make test     run the quick tests      (make test PYTEST_ARGS="-k plan -x"; -m slow for the slow ones)
#   make package  build the packages of a release and try one in an empty environment
#   make docs     build the documentation as a site in site/, without a network
#   make docs-release   keep this version's site on the branch gh-pages, as the latest; nothing is pushed
#   make wheel    build the packages and try one with the libraries of .venv
#   make check    style, types, documentation, packages and tests: what a change has to pass
#   make check-all   the same with every case of every sweep, and in an empty environment: what a release has to pass
#   make format   let ruff put the code into its form
#   make benchmark-page   render docs/benchmarks.md from benchmarks/results/
#   make clean    remove what the targets above have made

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?=
PYTEST_ARGS ?=
# Tests compute in one thread each, so that several run side by side; WORKERS=0 for a debugger.
WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal
# Commands that tests start import hundreds of files each: what Python has compiled is kept for the next one.
unexport PYTHONDONTWRITEBYTECODE
# The first Python that is new enough and can make environments. Some are only there in name, so each is asked.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	if $$python -c '$(USABLE)' >/dev/null 2>&1; then echo $$python; break; fi; done)

.PHONY: help demo test check check-all lint docs docs-release package wheel format benchmark-page clean
.DEFAULT_GOAL := help

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(READY)
	$(BIN)/gerund demo -o demo-output $(if $(MODEL),-m $(MODEL))

test: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

# The slow tests too, with a sample of each sweep (SWEEP_SEED=1 takes another one), or with all of it. They come last, so
# that their summary is the last line.
check: lint docs wheel
	$(PYTEST) -m "not full and not gpu" $(PYTEST_ARGS)

check-all: lint docs package
	$(PYTEST) -m "not gpu" $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Strict: a warning is an error. The variable silences an advertisement for another program.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# One folder a version and one for `latest`, chosen by a menu in the site; `git push origin gh-pages` publishes them.
docs-release: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases --alias-type copy \
		"$$($(BIN)/python -c 'import gerund; print(gerund.__version__)')" latest
	$(BIN)/mike set-default latest

package: $(READY)
	$(BIN)/python -m tests.package_check dist

# The same with the libraries of .venv, instead of minutes for an empty environment.
wheel: $(READY)
	$(BIN)/python -m tests.package_check dist --here

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark-page: $(READY)
	$(BIN)/python benchmarks/render.py

# Made again whenever the dependencies change. The stamp comes last: after an interruption, make goes on here.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "gerund needs Python 3.11 or newer with venv (on Debian: apt install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) demo-output site .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
