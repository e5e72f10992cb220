# Everything from a fresh machine with Python 3.10+, git and make:
#   make demo    creates .venv, installs, runs the demo
#   make check   creates .venv, installs with the test extra, runs lint, types, architecture and pure logic: two minutes
#   make test    the same and the site of docs/, and what guards the promises on the CPU: ten to twenty-five minutes
#   make test-long    the rest: chaos, benchmarks, the tutorial, every layout; before a release
#   make gpu-rehearsal    runs on CUDA tensors that are fake, without a GPU; most of them are part of `make test`
#   make gpu-test    tests/gpu by the Python that PYTHON names, on a machine with a GPU; installs nothing
#   make gpu-pack    collects into .whl and .kit what a GPU node without a network lacks (docs/gpu.md)
#   make hooks   installs the pre-commit hooks
#   make docs    builds docs/ as a site into build/site; a link that leads nowhere is an error
#   make test-core VERSION=0.19.2    the tests of models and runs on another megatron-core, put into .core
#   make test-python PYTHON=python3.12    the demo, settings and logits on another Python, in an environment in build
#   make test-wandb    the test of the tracker with the real wandb, installed into .wandb
#   make test-lmeval   creates .venv-lmeval with lm-evaluation-harness, compares the paper's five tasks with its own model
#   make test-gpulibs  calls of transformer-engine, flash-attn and apex against their Python, put into .gpulibs; no GPU needed
#   make test-aligner    creates .venv-aligner, tests the NeMo-Aligner plugin against the real package
#   make test-oracles    creates .venv-oracles with TRL and verl, compares losses, advantages and whole steps with theirs
#   make bench-trl ARGS='--steps 8 --repeats 3'    creates .venv-trl with TRL, compares its trainers with ours (--algorithm grpo)
# A command that finds .venv up to date with pyproject.toml and constraints.txt installs nothing.

SUPPORTED := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && { echo $$python; break; }; done)

VENV := $(if $(filter test-python,$(MAKECMDGOALS)),build/$(notdir $(PYTHON)),.venv)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
PEER_VENV := .venv-trl
PEER_INSTALLED := $(PEER_VENV)/.installed
PEER_REQUIREMENTS := benchmarks/peers/requirements-trl.txt
ALIGNER_VENV := .venv-aligner
ALIGNER_INSTALLED := $(ALIGNER_VENV)/.installed
ALIGNER_REQUIREMENTS := tests/aligner/requirements-nodeps.txt tests/aligner/requirements.txt
ALIGNER_PIP := $(ALIGNER_VENV)/bin/python -m pip --disable-pip-version-check install

ORACLES_VENV := .venv-oracles
ORACLES_INSTALLED := $(ORACLES_VENV)/.installed
ORACLES_REQUIREMENTS := tests/oracles/requirements-nodeps.txt tests/oracles/requirements.txt
ORACLES_PIP := $(ORACLES_VENV)/bin/python -m pip --disable-pip-version-check install

LMEVAL_VENV := .venv-lmeval
LMEVAL_INSTALLED := $(LMEVAL_VENV)/.installed

# Another megatron-core than that of .venv, and tests that `make test` runs on it too: parity, a layout of each kind, exact resume.
VERSION ?= 0.19.2
CORE := .core/$(VERSION)
CORE_PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(CORE)
CORE_QUICK := tests/unit/test_mcore_patches.py tests/parity/test_hf_logits.py::test_logits_equal_transformers \
	'tests/parity/test_hf_logits.py::test_scalar_head_equals_transformers_classifier[2-2]' \
	$(foreach case,tp1-pp4-dp1 tp1-pp1-dp4 tp2-pp1-dp1-sequence_parallel tp1-pp2-dp2-recompute-full, \
		'tests/gloo/test_training.py::test_steps_equal_plain_torch[$(case)]') \
	tests/e2e/test_resume.py::test_resumed_after_a_step_is_the_run_that_never_stopped

# The versions that megatron-core 0.16 names, and the one of the container that the Dockerfile begins from.
TE ?= transformer-engine>=2.9,<2.13

# Tests run in so many processes, a file in one of them.  Ranks that a file's tests start are used again by the next.
JOBS ?= 2
PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
CORE_PYTEST = OPPO_CORE=$(VERSION) PYTHONPATH=$(CURDIR)/$(CORE) $(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder
ALIGNER_PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONPATH=. $(ALIGNER_VENV)/bin/python -m pytest -W ignore tests/aligner
PURE := tests/architecture $(wildcard $(addprefix tests/unit/test_, $(addsuffix _*.py, \
	algorithms config control layout modeldir overcommit preflight rundir schedule)))

# Every process of the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-long test-aligner lint docs lint-and-docs hooks gpu-rehearsal gpu-test gpu-pack test-core test-python test-slurm test-wandb test-lmeval test-gpulibs test-oracles bench-trl clean

demo: $(INSTALLED)
	$(BIN)/oppo demo

check: lint
	$(PYTEST) -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not gpu and not long and not slow" $(PURE)

# The plugin's tests, which mostly wait, run beside the others; what they print comes at the end.
test: lint-and-docs $(ALIGNER_INSTALLED) $(CORE)/.installed
	@mkdir -p build
	$(ALIGNER_PYTEST) -m "not long" > build/aligner.log 2>&1 & aligner=$$!; \
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not gpu and not long"; tests=$$?; \
	wait $$aligner; aligner=$$?; cat build/aligner.log; [ $$((tests | aligner)) = 0 ]
	$(CORE_PYTEST) $(CORE_QUICK)

test-aligner: $(ALIGNER_INSTALLED)
	$(ALIGNER_PYTEST)

test-core: $(CORE)/.installed
	$(CORE_PYTEST) -m "not gpu and not long" tests/unit/test_mcore_*.py tests/parity tests/gloo tests/e2e tests/rehearsal

test-long: $(INSTALLED_TEST)
	$(BIN)/vermin --quiet --violations --no-tips --target=3.10- oppo_megatron tests benchmarks docs examples launch tools setup.py
	$(PYTEST) -n $(JOBS) --dist loadfile -m long --durations=0 --durations-min=5

lint-and-docs: $(INSTALLED_TEST)
	@$(MAKE) --no-print-directory -j2 --output-sync=recurse lint docs

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/english.py
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi

# Not --quiet, which would keep warnings from --strict.
docs: $(INSTALLED_TEST)
	if [ -n "$$(find oppo_megatron tests/mistakes -newer build/mistakes.md -name '*.py' 2>&1)" ]; then rm -f build/mistakes.md; fi
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

hooks: $(INSTALLED_TEST)
	$(PIP) -e '.[hooks]'
	$(BIN)/pre-commit install

gpu-rehearsal: $(INSTALLED_TEST)
	$(PYTEST) -n $(JOBS) --dist loadfile tests/rehearsal

# By the node's own Python: neither a network nor a .venv is needed.
gpu-test:
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -p no:cacheprovider tests/gpu

gpu-pack: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_node/pack.py $(ARGS)

# An index has torch with CUDA alone: 3 GB to fetch and 6 GB of disk for each Python, once.
test-python: $(INSTALLED_TEST)
	$(BIN)/oppo demo --quick --fresh --out $(VENV)/demo && $(BIN)/oppo validate $(VENV)/demo/oppo/config.yaml run_dir=$(VENV)/run
	$(PYTEST) -q -n $(JOBS) $(wildcard tests/unit/test_config_*.py) tests/parity/test_hf_logits.py

test-slurm: $(INSTALLED_TEST)
	OPPO_SLURM_ALL=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slurm tests/unit/test_cli_slurm.py

test-wandb: $(INSTALLED_TEST)
	test -d .wandb || $(PIP) --quiet --target .wandb 'wandb>=0.17'
	PYTHONPATH=$(CURDIR)/.wandb $(BIN)/python -m pytest tests/unit/test_train_logs.py

test-lmeval: $(LMEVAL_INSTALLED)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HOME=$(CURDIR)/build/lmeval \
		$(LMEVAL_VENV)/bin/python -m pytest -W ignore tests/lmeval

# The Python of these libraries alone: flash-attn would otherwise look for a compiler, or for a wheel of its own on the network.
test-gpulibs: $(INSTALLED_TEST)
	test -d .gpulibs/transformer_engine || $(PIP) --quiet --no-deps --only-binary=:all: --target .gpulibs/transformer_engine '$(TE)'
	test -d .gpulibs/flash_attn || { $(PIP) --quiet setuptools wheel && \
		FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE $(PIP) --quiet --no-deps --no-build-isolation \
		--target .gpulibs/flash_attn 'flash-attn>=2.5,<3'; }
	test -d .gpulibs/triton || $(PIP) --quiet --no-deps --target .gpulibs/triton 'triton>=3.4'
	$(PYTEST) tests/gpulibs

test-oracles: $(ORACLES_INSTALLED)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(ORACLES_VENV)/bin/python -m pytest -W ignore tests/oracles

bench-trl: $(INSTALLED) $(PEER_INSTALLED)
	$(BIN)/python benchmarks/peers/compare.py --prompt-tokens 64 $(ARGS)

clean:
	rm -rf $(VENV) $(PEER_VENV) $(ALIGNER_VENV) $(ORACLES_VENV) $(LMEVAL_VENV) .core .wandb .gpulibs .whl .kit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(PIP) -e .
	touch $@

$(INSTALLED_TEST): pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(PIP) -e '.[test,docs]'
	touch $(INSTALLED) $@

$(PEER_INSTALLED): $(PEER_REQUIREMENTS) | $(BIN)/python
	$(BIN)/python -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/python -m pip --disable-pip-version-check install -r $(PEER_REQUIREMENTS) || { \
		echo "TRL could not be installed: that needs access to a package index once, and Python 3.11 or newer."; exit 1; }
	touch $@

# Packages of .venv are found behind its own: torch and megatron-core are not installed twice.
$(ALIGNER_INSTALLED): $(ALIGNER_REQUIREMENTS) $(INSTALLED_TEST)
	rm -rf $(ALIGNER_VENV)
	$(BIN)/python -m venv --without-pip $(ALIGNER_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(ALIGNER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-project.pth"
	{ $(ALIGNER_PIP) --no-deps -r tests/aligner/requirements-nodeps.txt && $(ALIGNER_PIP) -r tests/aligner/requirements.txt; } || { \
		echo "NeMo-Aligner could not be installed: that needs access to a package index once, and Python 3.11 or newer."; exit 1; }
	touch $@

$(LMEVAL_INSTALLED): pyproject.toml constraints.txt $(INSTALLED_TEST)
	rm -rf $(LMEVAL_VENV)
	$(BIN)/python -m venv --without-pip $(LMEVAL_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(LMEVAL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-project.pth"
	$(LMEVAL_VENV)/bin/python -m pip --disable-pip-version-check install -c constraints.txt 'lm-eval>=0.4.13,<0.5' || { \
		echo "lm-evaluation-harness could not be installed: that needs access to a package index once."; exit 1; }
	touch $@

# Releases from 0.17 name Python 3.12, but their Python runs on 3.11; from 0.18 they import triton.
$(CORE)/.installed: $(INSTALLED_TEST)
	rm -rf $(CORE)
	$(CORE_PIP) --ignore-requires-python --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 'megatron-core==$(VERSION)' && $(CORE_PIP) triton==3.9.0 || { \
		echo "megatron-core $(VERSION) could not be fetched: that needs access to a package index once."; exit 1; }
	touch $@

# As above; what they ask for would bring ray, vllm and deepspeed, and other versions of torch and transformers.
$(ORACLES_INSTALLED): $(ORACLES_REQUIREMENTS) $(INSTALLED_TEST)
	rm -rf $(ORACLES_VENV)
	$(BIN)/python -m venv --without-pip $(ORACLES_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(ORACLES_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-project.pth"
	{ $(ORACLES_PIP) --no-deps -r tests/oracles/requirements-nodeps.txt && \
		$(ORACLES_PIP) -c constraints.txt -r tests/oracles/requirements.txt; } || { \
		echo "TRL or verl could not be installed: that needs access to a package index once, and Python 3.11 or 3.12 on x86-64."; exit 1; }
	touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(SUPPORTED)' || { \
		echo "Python 3.10 or newer is needed; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)."; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) -m venv failed; on Debian and Ubuntu install the package python3-venv."; exit 1; }
