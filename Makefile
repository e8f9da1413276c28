# Everything a fresh machine needs is `make demo` or `make test`; both set up .venv first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Processes of the tests: three for each of two cores, because many tests wait.
JOBS ?= 6
# Tests, and the processes that they start, are compiled once, also where the environment says not to keep bytecode.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo demo-online test test-gpu test-triton test-clusters test-browser test-ecosystem test-long test-bounds test-install test-image quick check docs habits screens wheel bench fuzz faults chaos clean

# One environment in steps, each with a mark: the package alone, what tests and checks need, and more for single targets.
# pip compiles every module that it installs, one after another: without that, modules are compiled when they are used.
PIP := $(VENV)/bin/pip install --quiet --no-compile

setup: $(VENV)/.done

$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	$(RUN) -c "import torch, torchfleet.ps.server.server, torchfleet.api.job_life"
	@touch $@

# The pip of older Pythons takes four times as long to find versions that fit. Tests have time-outs: all is compiled now.
$(VENV)/.done: $(VENV)/.run
	$(PIP) --upgrade pip
	$(PIP) --editable '.[dev]'
	$(RUN) -m compileall -qq -j 0 $(VENV)/lib || true  # some packages hold templates that are not Python
	@touch $@

$(VENV)/.ray: $(VENV)/.done
	$(PIP) --editable '.[dev,ray]'
	@touch $@

$(VENV)/.browser: $(VENV)/.done
	$(PIP) --editable '.[dev,browser]'
	@touch $@

demo: $(VENV)/.run
	$(VENV)/bin/fleetrun --server_num 2 --worker_num 2 examples/wide_deep/train.py --mode hybrid --batch_size 256 --rows 300000 --save demo_model
	$(RUN) examples/wide_deep/predict.py --model demo_model --rows 300000

# A stream of clicks trains a model, `fleet serve --follow` follows it, and a page shows the prediction for one item.
demo-online: $(VENV)/.serve
	$(RUN) examples/online/demo.py

$(VENV)/.serve: $(VENV)/.run
	$(PIP) --editable '.[serve]'
	@touch $@

# In a fresh checkout: the servers' kernels and the files of the tests are compiled once, each by one process. All
# processes of the tests would do it.
KERNELS := $(VENV)/bin/fleet compile
COMPILED := [ -d tests/__pycache__ ] || $(RUN) -m pytest --collect-only -q > /dev/null & $(KERNELS) && wait

test: setup
	$(COMPILED)
	$(RUN) -m pytest -n $(JOBS) --dist loadgroup

# On a machine with an NVIDIA GPU; one at a time, because tests look at the GPU's memory.
test-gpu: setup
	$(RUN) -m pytest -m gpu -n 0

# The kernels in Triton without a GPU, in its interpreter: their results, and no races.
test-triton: $(VENV)/.triton
	TRITON_INTERPRET=1 $(RUN) -m pytest tests/ps/gpu -k triton -n 2

$(VENV)/.triton: $(VENV)/.done
	$(PIP) triton
	@touch $@

# Installs Ray and, on a Debian machine, Slurm, which pip cannot; then runs what starts clusters of Ray and of Slurm.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
test-clusters: $(VENV)/.ray
	(command -v slurmctld && command -v munged) >/dev/null || ($(SUDO) apt-get update && $(SUDO) apt-get install --yes slurm-wlm munge)
	$(RUN) -m pytest -m cluster -n 0

# Installs playwright and, on a Debian machine, Chromium, unless FLEET_TEST_CHROMIUM names a browser, and looks at the dashboard in it.
test-browser: $(VENV)/.browser
	[ -n "$$FLEET_TEST_CHROMIUM" ] || command -v chromium >/dev/null || ($(SUDO) apt-get update && $(SUDO) apt-get install --yes chromium)
	$(RUN) -m pytest -m browser -n 0

# Models and training loops of seven other libraries, unchanged. RecBole's requirements are of 2023: it comes without them.
test-ecosystem: $(VENV)/.ecosystem
	$(RUN) -m pytest -m ecosystem -n 2 --dist loadgroup

$(VENV)/.ecosystem: $(VENV)/.done
	$(PIP) --editable '.[dev,ecosystem]'
	$(PIP) --no-deps recbole==1.2.1
	@touch $@

# What takes most of a minute or more each; a workflow runs them every week.
test-long: setup
	$(RUN) -m pytest -m long -n 2 --dist loadgroup

# Kernels, tables and what serves them with every array index checked, which numba leaves out otherwise: kernels are
# compiled anew, into a folder of their own.
test-bounds: setup
	mkdir -p -m 700 build/bounds
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/build/bounds $(RUN) -m pytest -n $(JOBS) --dist loadgroup --timeout 600 tests/ps/kernels tests/ps/tables tests/ps/worker tests/apps

# The first tutorial and the newcomer's hour, each in an empty virtual environment, outside the repository: pip fetches torch. Says how long each command took.
test-install: setup
	$(RUN) -m pytest -m install -n 0 -rP

# The Dockerfile on a base that debootstrap makes, and one server and two workers from it. Needs root, buildah and debootstrap.
test-image:
	deploy/test_image.sh build/image

# Every second test of each file, without those marked slow: a quarter of all tests. Of the wings whose tests start fleets,
# ranks and other processes, files that do without. Every process of pytest reads all files, and few tests wait: three.
QUICK := $(wildcard tests/test_*.py) $(addprefix tests/,api base data extensions observe ps \
	apps/online/test_folders.py apps/serve/test_batching.py apps/serve/endpoints/test_inference_protocol.py \
	apps/serve/endpoints/test_request_templates.py apps/test_nearest_items.py apps/word2vec/test_vectors.py \
	collective/checkpoint/test_tensor_files.py collective/pipeline/test_bubble.py \
	collective/strategies/mixed_precision/test_bfloat16_cpu.py collective/strategies/recomputation/test_slices.py \
	launch/clusters/k8s/test_adopt.py launch/clusters/test_k8s_production.py launch/endurance/test_placement.py \
	launch/test_cli.py launch/test_roles.py launch/test_server_branch.py)
quick: setup
	$(COMPILED)
	$(RUN) -m pytest -n 3 --dist loadgroup -m "not slow" --one_of 2 $(QUICK)

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(KERNELS) & $(VENV)/bin/mypy && wait $$!
	$(RUN) -m pytest -n $(JOBS) --dist loadgroup

# The site of docs/, into site/; a broken link fails. Its packages are the extra `docs`, which `make setup` leaves out.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

$(VENV)/.docs: $(VENV)/.done
	$(PIP) --editable '.[docs]'
	@touch $@

# The page of torch's habits in every mode, docs/torch_habits.md, from runs of all of them.
habits: setup
	PYTHONPATH=.:tests $(RUN) -m support.habits --write

# Screens of the display for docs/screens, from real jobs in tmux: two minutes. Then those of the dashboard, in Chromium.
screens: $(VENV)/.browser
	$(RUN) -m benchmarks.terminal_screens
	PYTHONPATH=.:tests $(RUN) -m support.dashboard_screens

# The wheel and the source archive, into dist/, with what is in the wheel checked. Needs no `make setup`. The same commit
# gives the same bytes: times in the archives are that of the commit.
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
wheel:
	$(PYTHON) -m venv $(VENV)-build
	$(VENV)-build/bin/pip install --quiet build twine
	rm -rf build dist
	$(VENV)-build/bin/python -m build --outdir dist
	$(VENV)-build/bin/python tests/support/same_archive.py dist/*.tar.gz
	$(VENV)-build/bin/python tests/support/wheel_contents.py dist/*.whl
	$(VENV)-build/bin/twine check --strict dist/*

bench: setup
	$(RUN) -m benchmarks.ps --json

# Longer searches than those in `make test`: of all decoders by coverage, then twenty million mutated messages, then
# the tests that draw their cases by support/searches.py.
FUZZ ?= 10000000
fuzz: setup
	PYTHONPATH=.:tests $(RUN) -m support.fuzz --executions $(FUZZ)
	FLEET_FUZZ_FRAMES=$$((2 * $(FUZZ))) $(RUN) -m pytest tests/ps/net/test_fuzz.py -q --timeout 7200
	FLEET_SEARCH_DEPTH=20 $(RUN) -m pytest -n $(JOBS) --dist loadgroup -q --timeout 1800 $$(grep -rl support.searches tests --include 'test_*.py')

# Whole fleets in virtual time under faults, more of them than in `make test`; then all planted bugs.
FAULTS ?= 10000
faults: setup
	PYTHONPATH=.:tests $(RUN) -m support.faults --schedules $(FAULTS)

# Real processes under kills, stops, broken links and full disks; link faults need root.
MINUTES ?= 5
chaos: setup
	$(RUN) -m benchmarks.chaos --minutes $(MINUTES) --json
	$(RUN) -m benchmarks.chaos --durability log --minutes $(MINUTES) --json

clean:
	rm -rf $(VENV) $(VENV)-build build dist site *.egg-info
