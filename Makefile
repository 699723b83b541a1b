# The demos and `make test` set up .venv by themselves; PYTHON names the Python it is made from.
PYTHON_GIVEN := $(filter-out undefined,$(origin PYTHON))
PYTHON ?= python3
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
ARGS ?=

bootstrap = @command -v $(PYTHON) >/dev/null || \
	{ echo "No $(PYTHON) here: name a Python >= 3.10, as in make PYTHON=python3.11" >&2; exit 1; }; \
	$(PYTHON) tools/bootstrap.py --venv $(VENV)

# Compiling the CUDA kernels needs no GPU, but packages that exist for Linux only.
ifeq ($(shell uname -sm),Linux x86_64)
TEST_EXTRAS := dev,bench,cuda,hf
TEST_SCOPE := --require-cuda-extra --require-hf-extra
else
TEST_EXTRAS := dev,bench,hf
TEST_SCOPE := --require-hf-extra --ignore=tests/ascend/lowered
endif

# Of pytest-xdist. Each worker has tests that follow each other, as those do that run the same kernels: two workers that
# want one compiled wait for each other.
WORKERS := -n auto --dist worksteal

.PHONY: help demo train-demo needle-demo generate-demo cp-demo residual-demo test test-full coverage fuzz fuzz-gpu test-oldest test-blas test-ascend test-interpreted test-blackwell lint format docs test-gpu bench-gpu check-gpu compile-all release-check stamp clean distclean
# Bytecode is kept, whatever the caller's environment says: tests start hundreds of processes that import the same files.
unexport PYTHONDONTWRITEBYTECODE

# Two targets at once (make -j) would set up the same .venv twice.
.NOTPARALLEL:

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

demo: ## set up and run the short benchmark demo, on this machine's device (on a CPU, 40 seconds after set-up)
	$(bootstrap) --extras bench
	$(VENV_PYTHON) bench/bench_sparse_attn_e2e.py --demo

train-demo: ## set up and train tiny language models with dense attention, NSA and parts of NSA, on the CPU (two minutes of one core)
	$(bootstrap) --extras bench
	OMP_NUM_THREADS=1 $(VENV_PYTHON) examples/train_text.py --device cpu

needle-demo: ## set up and train tiny models to look up values by far keys, with dense attention, NSA and parts of NSA, on the CPU
	$(bootstrap) --extras bench
	$(VENV_PYTHON) examples/needle.py --device cpu

generate-demo: ## set up, train a tiny language model and let it write text, with a cache and without, on the CPU (about a minute)
	$(bootstrap) --extras bench
	OMP_NUM_THREADS=1 $(VENV_PYTHON) examples/generate.py --device cpu

cp-demo: ## set up and train a tiny language model on whole sequences, then with each divided among two processes; fail unless losses are equal (58 seconds on two cores)
	$(bootstrap) --extras bench
	OMP_NUM_THREADS=1 $(VENV_PYTHON) examples/train_text.py --device cpu --variants nsa --steps 40 --out bench/results/local/train-whole
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_text.py --device cpu --steps 40 \
		--context-parallel 2 --beside bench/results/local/train-whole.json --out bench/results/local/train-divided

residual-demo: ## set up and train tiny language models with sums of layers' outputs and with attention, on the CPU
	$(bootstrap) --extras bench
	$(VENV_PYTHON) examples/train_residual.py --device cpu

test: ## set up and run the tests; some only: make test ARGS="-k name"
	$(bootstrap) --extras $(TEST_EXTRAS)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(WORKERS) -m "not cuda and not ascend and not interpreted" $(TEST_SCOPE) $(ARGS)

test-full: ## the same with every case, where `make test` has one of a kind
	$(bootstrap) --extras $(TEST_EXTRAS)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(WORKERS) -m "not cuda and not ascend" --full $(TEST_SCOPE) $(ARGS)

coverage: ## run the tests of nsa and dispatch, and fail unless they cover 95 % of both
	$(bootstrap) --extras $(TEST_EXTRAS)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(WORKERS) -m "not cuda and not ascend and not interpreted" --cov=nsa --cov=dispatch \
		--cov-fail-under=95 $(TEST_SCOPE) tests/nsa tests/dispatch $(ARGS)

FUZZ_EXAMPLES ?= 10000
fuzz: ## run 10,000 drawn calls of the public functions on the CPU; FUZZ_OUT=file.json records the outcome
	$(bootstrap) --extras dev,bench
	OMP_NUM_THREADS=1 FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) FUZZ_OUT=$(FUZZ_OUT) $(VENV_PYTHON) -m pytest -n auto -p tests.support.fuzz_report \
		tests/nsa/test_fuzz.py $(ARGS)

# FUZZ_SECONDS: of each case, beyond which it draws no more. A process for each case, which compiles its kernels.
fuzz-gpu: ## the same of kernels on an NVIDIA GPU; PYTHON=python3 uses that Python as it is, without .venv
ifeq ($(PYTHON_GIVEN),)
	$(bootstrap) --extras dev,bench
endif
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) FUZZ_OUT=$(FUZZ_OUT) $(if $(PYTHON_GIVEN),$(PYTHON),$(VENV_PYTHON)) -m pytest -n 20 -m cuda \
		--require-cuda-extra -p tests.support.fuzz_report tests/cute/test_fuzz.py $(ARGS)

# No extras: they ask for newer packages than the oldest torch has beside it, as the interpreter of kernels does.
OLDEST := .cache/oldest
test-oldest: ## set up the oldest torch that is supported, in .cache, and run the tests of the public functions on the CPU
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet torch==2.6.0 "numpy<2.4" pytest hypothesis rich
	OMP_NUM_THREADS=1 PYTHONPATH=. $(OLDEST)/bin/python -m pytest -m "not cuda" -k "not interpreter" tests/nsa/test_api.py tests/nsa/test_errors.py \
		tests/nsa/test_reference.py tests/nsa/test_fuzz.py tests/nsa/test_operators.py tests/nsa/test_training_tools.py \
		tests/nsa/test_neighborhood_module.py $(ARGS)

# Files that hold a test marked so; those first that take longest, which interpret with Triton.
marked = $(sort $(shell grep -rlE "mark\.($(1))\b" tests --include="test_*.py"))

# OpenBLAS's name of a CPU (Haswell serves Zen, too; SkylakeX; Nehalem), whose instructions this one must have; files.
BLAS ?= Haswell
BLAS_TESTS ?=
test-blas: ## run tests of bits that a sum by BLAS could change, marked `blas`, with NumPy's as on another CPU, BLAS=Haswell; others: BLAS_TESTS=file
	$(bootstrap) --extras $(TEST_EXTRAS)
	OPENBLAS_CORETYPE=$(BLAS) OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(WORKERS) -m "$(if $(BLAS_TESTS),,blas and) not cuda and not ascend" \
		$(TEST_SCOPE) $(or $(BLAS_TESTS),$(call marked,blas)) $(ARGS)

test-ascend: ## set up what proves the Ascend kernels without an NPU, in .cache without root, and run these tests; every case in every dtype: ARGS=--full
	$(bootstrap) --extras dev,bench
	$(VENV_PYTHON) tools/ascend_toolchain.py
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(WORKERS) -m ascend tests/ascend/lowered $(ARGS)

# Markers, in CI also `blas` and `ascend`: each session takes ten seconds to start and to collect.
EXECUTED ?= interpreted
test-interpreted: ## execute compiled kernels on the CPU: CUDA kernels, Blackwell's in the part of their table in which every value comes, and Triton's
	$(bootstrap) --extras $(TEST_EXTRAS)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(WORKERS) -m "($(subst |, or ,$(EXECUTED))) and not cuda" $(TEST_SCOPE) \
		$(call marked,$(EXECUTED)) $(ARGS)

test-blackwell: ## execute every kernel of Blackwell on the CPU: all of that table, and kernels without what orders them (half an hour on two cores, the first time an hour)
	$(bootstrap) --extras $(TEST_EXTRAS)
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(WORKERS) --full $(TEST_SCOPE) tests/cute/test_blackwell.py tests/cute/test_order_deletions.py $(ARGS)

test-gpu: ## run the tests that need an NVIDIA GPU; PYTHON=python3 uses that Python as it is, without .venv
ifeq ($(PYTHON_GIVEN),)
	$(bootstrap) --extras dev,bench
	$(VENV_PYTHON) -m pytest -m cuda --require-cuda-extra $(ARGS)
else
	$(PYTHON) -m pytest -m cuda --require-cuda-extra $(ARGS)
endif

bench-gpu: ## run the end-to-end benchmark on an NVIDIA GPU, forward and backward; options: ARGS="--seqlens 64K --out file"
	$(bootstrap) --extras bench,cuda
	$(VENV_PYTHON) bench/bench_sparse_attn_e2e.py --device cuda --backward $(ARGS)

check-gpu: ## on an NVIDIA GPU from compute capability 8.0 on: time and test the Triton kernels, and write a file to send in (docs/usage.md)
	$(bootstrap) --gpu --extras dev,bench
	$(VENV_PYTHON) tools/check_gpu.py

compile-all: ## compile every CUDA kernel for every architecture, without a GPU (more than an hour on two cores)
	$(bootstrap) --extras dev,bench,cuda
	$(VENV_PYTHON) tools/compile_all.py $(ARGS)

release-check: ## install the built wheel with each extra into a fresh environment and try it there; some only: make release-check ARGS="base hf"
	$(bootstrap) --extras dev
	$(VENV_PYTHON) tools/release_check.py $(ARGS)

stamp: ## write the commit and digests of its files to .commit.json, for copies of this checkout without git
	$(PYTHON) bench/commit.py

lint: ## check format, lint rules, types and English; licences and known vulnerabilities of what is installed
	$(bootstrap) --extras dev,bench
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) tools/check_english.py
	$(VENV_PYTHON) tools/check_licences.py

format: ## rewrite the sources to the house format
	$(bootstrap) --extras dev,bench
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

# Not --quiet: it hides warnings from --strict, too.
docs: ## build the documentation site, strictly, into build/site
	$(bootstrap) --extras docs
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict --site-dir build/site

clean: ## remove caches and build outputs, but not the toolchains in .cache
	rm -rf .cache/ptx build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov .commit.json
	find . \( -path ./$(VENV) -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv, the Ascend toolchain and the oldest torch
	rm -rf $(VENV) .cache/ascend $(OLDEST)
