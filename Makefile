# The README's commands. Each of them first makes a virtual environment in .venv with pinned versions, if there is none.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-numerics test-matrix lint bench reproduce reproduce-figures curvature setup

SCALE ?= similar
RESULTS := $(if $(filter paper,$(SCALE)),runs/paper,results/$(SCALE))

demo: setup  ## train the quick preset with and without delay, draw the curves (minutes)
	$(BIN)/brx demo

# Three at a time on two cores, since some tests wait for processes. A worker that has no tests left takes over another's.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

test: setup  ## whether a clone works: the tests in five minutes on two quiet cores
	$(PYTEST) -m "not slow"

test-all: setup  ## all tests
	$(PYTEST)

# Other processors use other kernels. These settings, which torch reads when it starts, imitate some of them on an x86
# processor. The first one is left out on a processor without AVX-512, where `make test-all` has used these kernels anyway.
KERNELS := $(if $(shell grep -om1 avx512f /proc/cpuinfo 2>/dev/null),"ATEN_CPU_CAPABILITY=avx2") \
	"ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE"

test-numerics: setup  ## the tests in which rounding matters most, with other kernels and BLAS code paths
	for kernels in $(KERNELS); do \
		echo "$$kernels"; env $$kernels $(BIN)/python -m pytest -n 2 -m "numerics and not slow" || exit 1; \
	done

test-matrix:  ## the tests on Python 3.11, 3.12, 3.13 and with the oldest and the newest torch (hours, gigabytes); see .ci/matrix
	.ci/matrix

lint: setup  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## speed, as ratios measured side by side, and operations counted; tables go to benchmarks/results
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.launches
	$(BIN)/python -m benchmarks.distributed
	$(BIN)/python -m benchmarks.optimizers
	$(BIN)/python -m benchmarks.small_models
	$(BIN)/python -m benchmarks.compiled
	$(BIN)/python -m benchmarks.muon
	$(BIN)/python -m benchmarks.lab
	$(BIN)/python -m benchmarks.sharded

reproduce: setup  ## run all sweeps of a scale (SCALE=similar, tuned, llama, laptop or paper; long, continues where it was left), then draw
	$(BIN)/brx sweep $(wildcard configs/sweeps/$(SCALE)/*.yaml configs/sweeps/$(SCALE)/*/*.yaml) || test $$? -eq 1  # cells may fail: rates that diverge
	$(if $(filter paper,$(SCALE)),,$(BIN)/brx export runs/$(SCALE) --to results/$(SCALE))
	$(MAKE) reproduce-figures SCALE=$(SCALE)

reproduce-figures: setup  ## draw every figure and table from the results at hand (1 to 3 minutes on 2 cores)
	$(BIN)/brx plot all --scale $(SCALE) --runs $(RESULTS)
	$(BIN)/brx tables all --scale $(SCALE) --runs $(RESULTS) --out results/tables/$(SCALE)
	$(BIN)/brx slowdown $(RESULTS) --all-targets figures/$(SCALE)/slowdown-all-targets
	$(BIN)/brx verdict $(RESULTS) --stages 32 --micro-batches 8 --save results/tables/$(SCALE)/time-to-loss.json \
		--figure figures/$(SCALE)/verdict
	$(if $(wildcard results/laptop-start),$(BIN)/brx tables experiments --runs results/laptop-start --out results/tables/laptop-start)
	$(if $(wildcard results/lab/profiles),$(BIN)/brx plot profiles results/lab/profiles --out figures/lab/profiles)
	$(if $(wildcard results/lab/staleness),$(BIN)/brx plot staleness results/lab/staleness/* --out figures/lab/staleness)
	$(if $(wildcard results/own-model),$(BIN)/brx plot curves results/own-model/*lr0.0003-s0 --out figures/own-model)
	$(if $(wildcard results/compare),$(BIN)/brx compare --figure figures/compare --format markdown > results/tables/compare.md)

MIDWAY_laptop := runs/laptop-curvature/*/checkpoints/00004000
TRACED_laptop := runs/laptop-curvature/*/checkpoints/0000[246]000
MIDWAY_similar := runs/similar-curvature/*/checkpoints/00016000
TRACED_similar := runs/similar-curvature/*/checkpoints/000[012][468]000
MIDWAY_paper := runs/paper/*/checkpoints/00125000
TRACED_paper := $(MIDWAY_paper)

curvature: setup  ## train with checkpoints midway, measure norms and oscillation (SCALE=similar, laptop or paper; hours)
	$(BIN)/brx sweep configs/sweeps/$(SCALE)/curvature.yaml $(wildcard configs/sweeps/$(SCALE)/common-rate.yaml)
	$(BIN)/brx hessian-norm $(MIDWAY_$(SCALE))
	$(BIN)/brx hessian-norm $(MIDWAY_$(SCALE)) --strategies
	$(BIN)/brx oscillation $(TRACED_$(SCALE))
	$(if $(filter paper,$(SCALE)),,$(BIN)/brx export runs/$(SCALE)-curvature --to results/$(SCALE)-curvature)

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
