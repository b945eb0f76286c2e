# Needs Python 3.11 with pip, nothing else. Everything is made inside this folder: .venv, models/, demo-out/.
#
#   make demo [MINUTES=8]   the whole loop on a real small model, at most 15 minutes after the install
#   make rivals              other implementations that some tests compare with; make test makes them too
#   make check               lint, types, unit tests: under 2 minutes
#   make test                every test, the real SGLang included: under 30 minutes
#   make clean               take away what make made

PYTHON ?= python3.11
MINUTES ?= 8
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed
REQUIREMENTS := $(addprefix docker/requirements-,sglang-cpu.txt app.txt dev.txt)
MODEL := models/smollm2-135m
# Other implementations, one folder each and never on our path: tests/rival.py runs them in processes of their own.
RIVALS := $(VENV)/rivals
RIVAL_LISTS := $(wildcard tests/rivals/*.txt)
RIVAL_STAMPS := $(RIVAL_LISTS:tests/rivals/%.txt=$(RIVALS)/%/.installed)

.PHONY: demo test lint check install rivals clean
.DEFAULT_GOAL := check

install: $(STAMP)

$(STAMP): pyproject.toml $(REQUIREMENTS)
	@echo "installing into $(VENV): about 7 GB, some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(addprefix --requirement ,$(REQUIREMENTS))
	@$(PIP) install --no-deps sglang==0.5.23
	@$(PIP) install --no-deps --editable .
	@touch $(STAMP)

$(MODEL)/fetched.json: $(STAMP)
	@$(BIN)/dflash-online model fetch smollm2-135m --to $(MODEL)
	@touch $@

# Without their dependencies: they run on ours, which are near enough for what is compared.
$(RIVALS)/%/.installed: tests/rivals/%.txt $(STAMP)
	@rm -rf $(@D)
	@$(PIP) install --no-deps --target $(@D) --requirement $<
	@touch $@

rivals: $(RIVAL_STAMPS)

demo: $(STAMP)
	@$(BIN)/dflash-online demo --minutes $(MINUTES)

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary

check: lint
	@$(BIN)/python -m pytest -q tests/unit

test: $(MODEL)/fetched.json $(RIVAL_STAMPS)
	@DFLASH_MODEL=$(CURDIR)/$(MODEL) DFLASH_RIVALS=$(CURDIR)/$(RIVALS) $(BIN)/python -m pytest -q

clean:
	rm -rf $(VENV) models demo-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
