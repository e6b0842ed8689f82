# make demo       train a small model on this machine's device, and show the effect of attention
# make test       lint, types, and the fast tests: the development loop, takes some minutes
# make full       the same with all tests; must pass before merging
# make notebooks  run examples/notebooks on the CPU, and write their outputs into the files
# make docs       build the documentation site in site/; broken links and anchors are errors
# These targets set up their own environment. They need only PYTHON (>= 3.11).

PYTHON ?= python3
JOBS ?= 2
ENV := .venv
RUN := $(ENV)/bin/python
DOCS := .venv-docs
# A step whose tool cannot be found or installed (no network) is skipped with a note. If the tool is there, it must pass.
# $(3) is the interpreter, if it is another one than that of the tests.
tool = if $(or $(3),$(RUN)) -m $(1) --version >/dev/null 2>&1; then \
       echo "$(or $(3),$(RUN)) -m $(1) $(2)"; $(or $(3),$(RUN)) -m $(1) $(2); \
       else echo "$(1) is not installed here: left out"; fi
# worksteal: with the default, a worker may wait for minutes while the other one has slow tests left.
pytest = $(RUN) -m pytest $(shell $(RUN) -c "import xdist" 2>/dev/null && echo "-n $(JOBS) --dist worksteal")

.PHONY: demo test full lint notebooks docs clean
.DELETE_ON_ERROR:

# The demo needs no tools of the tests. An environment that has them runs it too.
demo: $(or $(wildcard $(ENV)/ready),$(ENV)/runs)
	$(RUN) examples/demo.py $(DEMO)

test: lint
	$(pytest) -m "not slow" $(TESTS)
	TRITON_INTERPRET=1 $(pytest) -m "not slow" tests/interpreter

full: lint
	$(pytest)
	TRITON_INTERPRET=1 $(pytest) tests/interpreter

lint: $(ENV)/ready
	@$(call tool,ruff,check .)
	@$(call tool,ruff,format --check .)
	@$(call tool,pyright,--threads $(JOBS) --pythonpath $(RUN))

notebooks: $(ENV)/ready
	$(RUN) tools/notebooks.py $(NOTEBOOKS)

docs: $(DOCS)/ready
	@export NO_MKDOCS_2_WARNING=1; $(call tool,mkdocs,build --strict,$(DOCS)/bin/python)

INPUTS := pyproject.toml constraints.txt tools/environment.py
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'

$(ENV)/runs: $(INPUTS)
	@$(NEW_ENOUGH)
	$(PYTHON) tools/environment.py $(ENV)
	@touch $@

$(ENV)/ready: $(INPUTS)
	@$(NEW_ENOUGH)
	$(PYTHON) tools/environment.py $(ENV) --tests
	@touch $@

$(DOCS)/ready: $(INPUTS)
	@$(NEW_ENOUGH)
	$(PYTHON) tools/environment.py $(DOCS) --docs
	@touch $@

clean:
	rm -rf $(ENV) $(DOCS) site .pytest_cache .ruff_cache .hypothesis
