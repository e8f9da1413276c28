# Everything a fresh machine needs is `make demo` or `make test`; both set up .venv first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Tests, and the processes that they start, are compiled once, also where the environment says not to keep bytecode.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo test test-gpu test-clusters quick check bench fuzz faults clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	@touch $@

demo: setup
	$(VENV)/bin/fleetrun --server_num 2 --worker_num 2 examples/wide_deep/train.py --rows 300000 --save demo_model
	$(RUN) examples/wide_deep/predict.py --model demo_model --rows 300000

test: setup
	$(RUN) -m pytest -n 2 --dist loadgroup

# On a machine with an NVIDIA GPU; one at a time, because tests look at the GPU's memory.
test-gpu: setup
	$(RUN) -m pytest -m gpu -n 0

# On a Debian machine: installs Slurm, which pip cannot, then runs what starts clusters of Ray and of Slurm.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
test-clusters: setup
	(command -v slurmctld && command -v munged) >/dev/null || ($(SUDO) apt-get update && $(SUDO) apt-get install --yes slurm-wlm munge)
	$(RUN) -m pytest -m cluster -n 0

# Without whole fleets and ranks, and without what takes more than ten seconds: four fifths of the tests.
FLEETS := integration examples launch benchmarks collective ecosystem
quick: setup
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not slow" $(FLEETS:%=--ignore tests/%)

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest -n 2 --dist loadgroup

bench: setup
	$(RUN) -m benchmarks.ps --json

# Longer searches than those in `make test`: of all decoders by coverage, then twenty million mutated messages.
FUZZ ?= 10000000
fuzz: setup
	PYTHONPATH=.:tests $(RUN) -m support.fuzz --executions $(FUZZ)
	FLEET_FUZZ_FRAMES=$$((2 * $(FUZZ))) $(RUN) -m pytest tests/net/test_fuzz.py -q --timeout 7200

# Whole fleets in virtual time under faults, more of them than in `make test`; then all planted bugs.
FAULTS ?= 10000
faults: setup
	PYTHONPATH=.:tests $(RUN) -m support.faults --schedules $(FAULTS)

clean:
	rm -rf $(VENV) build dist *.egg-info
