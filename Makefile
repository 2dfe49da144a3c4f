# make demo | test | test-all | lint | bench | gpu-kit | docs | site   PYTHON=python3.12 TORCH=cpu make demo
PYTHON ?= python3
# TORCH=cpu takes PyTorch's CPU wheel from its own index instead of the CUDA build.
TORCH ?=
DEMO := .venv
TEST := .venv-test
PIP = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
TORCH_CPU = $(if $(filter cpu,$(TORCH)),$(call PIP,$(1)) torch --index-url https://download.pytorch.org/whl/cpu,true)
SOURCES := setup.cfg pyproject.toml
WORKERS := -n auto --maxprocesses 4 --dist worksteal

.PHONY: demo test test-all lint bench gpu-kit docs site clean

$(DEMO)/.installed: $(SOURCES)
	$(PYTHON) -m venv --clear $(DEMO)
	$(call TORCH_CPU,$(DEMO))
	$(call PIP,$(DEMO)) -e .
	touch $@

$(TEST)/.installed: $(SOURCES)
	$(PYTHON) -m venv --clear $(TEST)
	$(call TORCH_CPU,$(TEST))
	$(call PIP,$(TEST)) -e ".[test]"
	touch $@

# Four hospitals with different cameras and case mix; phantom images, so nothing is downloaded.
demo: $(DEMO)/.installed
	rm -rf runs/demo
	$(DEMO)/bin/medfl run ham10000 --data phantom --method fedbm --preset demo --with-local --out runs/demo

test: $(TEST)/.installed
	$(TEST)/bin/python -m pytest $(WORKERS)

# Everything that can run here, the slow tests too.
test-all: $(TEST)/.installed
	$(TEST)/bin/python -m pytest $(WORKERS) -m "not gpu and not flare"

lint: $(TEST)/.installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(TEST)/bin/lint-imports

bench: $(TEST)/.installed
	$(TEST)/bin/python benchmarks/overhead.py
	$(TEST)/bin/python benchmarks/method_cost.py

# What benchmarks/gpu_day.py needs on a machine with a GPU and without a network: wheels, and images from $MEDFL_DATA.
gpu-kit: $(TEST)/.installed
	$(TEST)/bin/python benchmarks/gpu_kit.py

# What docs/ say of the code is made from it, the tables of docs/results.md from the summaries of runs.
docs: $(TEST)/.installed
	$(TEST)/bin/python docs/site/generate.py
	$(TEST)/bin/python docs/results/make.py

# The documentation as a site that needs no network: build/site/index.html
site: $(TEST)/.installed
	NO_MKDOCS_2_WARNING=1 $(TEST)/bin/python -m mkdocs build --quiet --strict -f docs/site/mkdocs.yml

clean:
	rm -rf $(DEMO) $(TEST) build *.egg-info
