# Every target sets itself up: a virtual environment in .venv, once.
.PHONY: demo test test-faults test-cluster-ray test-frameworks check bench bench-tune conformance docs release setup
SHELL := /bin/bash

setup:
	@scripts/setup

demo: setup  ## the main job end to end; options: make demo ARGS="--quick"
	@scripts/packages
	@.venv/bin/stretto demo $(ARGS)

test: setup  ## this commit's share of the tests; STRETTO_TEST_ALL=1 for all; options: make test ARGS="-k lab -x"
	@scripts/packages
	@scripts/test $(ARGS)

test-faults: setup  ## every fault of hosts, links and ranks that elastic training must survive
	@scripts/test -q -m faults $(ARGS)

test-cluster-ray: setup  ## what every engine of a cluster must do, on Ray, in an environment of its own
	@scripts/test-cluster-ray $(ARGS)

test-frameworks: setup  ## what needs JAX, TensorFlow or Keras, in an environment of its own
	@scripts/test-frameworks $(ARGS)

check: setup  ## style, types, import directions, language
	@scripts/check

bench: setup  ## the benchmarks with a star in benchmarks/README.md, into benchmarks/results/
	@scripts/packages
	@scripts/bench $(ARGS)

conformance: setup  ## PyTorch's own tests of DDP with our class; ARGS="test_ddp_device" for some
	@scripts/conformance $(ARGS)

bench-tune: setup  ## tuning inside the run on emulated networks, into benchmarks/results/tune_*.json
	@scripts/packages
	@OMP_NUM_THREADS=1 .venv/bin/python benchmarks/tune_network.py $(ARGS)

docs: setup  ## the documentation as pages, into site/
	@scripts/docs $(ARGS)

release: setup  ## build wheel and sdist into dist/ and check them; publishes nothing
	@scripts/release
