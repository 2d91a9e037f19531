# make demo      train a DLRM without histories, with their mean, their sum, and attention; compare them with baselines
# make test      ruff, mypy and the test suite; without a GPU the kernels run through Triton's interpreter
# make test-all  the same with the slow tests
# make test-trackers  metrics read back from Weights & Biases and MLflow, which it installs
# make docs      build the documentation as a site in site/, without torch; a warning fails
# make bench     measure speed and memory beside the peers
# Each target first creates .venv and installs into it; a second call installs nothing.

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
# The first that runs and is 3.11 or 3.12: a name on the PATH may be a version manager's stand-in for one not installed.
FITS := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
BASE_PYTHON := $(shell for p in python3 python3.12 python3.11; do $$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)
NEEDS_PYTHON = $(if $(BASE_PYTHON),,$(error Python 3.11 or 3.12 is needed, and neither python3, python3.12 nor python3.11 is one))
BUILD := $(if $(shell command -v nvidia-smi),cuda,cpu)
# Pinned for a CPU, so that each run of the tests has the same versions; they are a row of jfi/utils/lockstep.py.
CPU_RELEASES := torch==2.13.0 triton==3.7.1 fbgemm-gpu-cpu==1.8.0
TORCHREC := torchrec==1.9.2

# Threads that wait for each other and spin would keep two jobs on the same cores from getting on.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-all test-trackers bench docs lint clean

demo: $(VENV)/.installed
	$(PYTHON) examples/synthetic_tables.py quickstart
	$(PYTHON) -m jfi compare --config configs/quickstart.yaml

# Worker processes of the test run, each with one thread.  A module's tests share a worker and its fixtures; those in
# tests/conftest.py come first.  Temporary files are in memory where 8 GB are free: the suite makes and removes many.
WORKERS ?= 2
FREE := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 8000000')
PYTEST := $(if $(FREE),TMPDIR=/dev/shm) OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WORKERS) --dist loadscope \
    --no-loadscope-reorder -o tmp_path_retention_policy=failed

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

test-trackers: $(VENV)/.installed-trackers
	$(PYTHON) -m pytest tests/training/test_trackers.py

bench: $(VENV)/.installed
	$(PYTHON) -m benchmarks

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

lint: $(VENV)/.installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# editable_mode: otherwise the checkout's own folder, where it is called jfi, hides the package from its parent folder.
# For a CPU, TorchRec is installed without its requirements, which the cpu extra lists: they would pull fbgemm's CUDA build.
$(VENV)/.installed: pyproject.toml
	$(NEEDS_PYTHON)
	$(BASE_PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[$(BUILD),train,serve,test]' $(if $(filter cpu,$(BUILD)),$(CPU_RELEASES)) --config-settings editable_mode=compat
	$(if $(filter cpu,$(BUILD)),$(PIP) --no-deps $(TORCHREC))
	touch $@

$(VENV)/.installed-trackers: $(VENV)/.installed
	$(PIP) --editable '.[trackers]' --config-settings editable_mode=compat
	touch $@

# The site reads the code and does not import it, so torch is not needed.
$(VENV)/.installed-docs: docs/site/requirements.txt
	$(NEEDS_PYTHON)
	$(BASE_PYTHON) -m venv $(VENV)
	$(PIP) --requirement $<
	touch $@

clean:
	rm -rf $(VENV) site
