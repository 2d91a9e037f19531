# make demo   train a DLRM without, with averaged and with attended histories, and compare (5 minutes on 2 cores)
# make test   ruff and the test suite (through Triton's interpreter where there is no GPU)
# make bench  speed and memory beside the peers, on whatever is there
# Each makes .venv and installs into it first; a second call installs nothing.

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
BASE_PYTHON := $(shell command -v python3.12 || command -v python3.11 || command -v python3)
BUILD := $(if $(shell command -v nvidia-smi),cuda,cpu)
TORCHREC := torchrec==1.8.0

.PHONY: demo test bench lint clean

demo: $(VENV)/.installed
	$(PYTHON) examples/compare_pooling.py --config configs/quickstart.yaml

test: lint
	$(PYTHON) -m pytest

bench: $(VENV)/.installed
	$(PYTHON) -m benchmarks

lint: $(VENV)/.installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# On a processor TorchRec goes in without its requirements, which the cpu extra lists: they would pull fbgemm's CUDA build.
$(VENV)/.installed: pyproject.toml
	$(BASE_PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[$(BUILD),train,test]'
	$(if $(filter cpu,$(BUILD)),$(PIP) --no-deps $(TORCHREC))
	touch $@

clean:
	rm -rf $(VENV)
