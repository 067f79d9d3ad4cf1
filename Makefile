# Each target makes the environment by itself; any order, any number of times.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python

.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "Python 3.11 to 3.13 is needed, this is %d.%d: make PYTHON=python3.12 ..." % v)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -r requirements.txt
	touch $@

install: $(VENV)/installed ## make .venv and install requirements.txt

install-gpu: install ## the same and requirements-gpu.txt
	$(RUN) -m pip install setuptools wheel ninja packaging
	$(RUN) -m pip install --no-build-isolation -r requirements-gpu.txt

train: install ## train the embedded tiny model with GRPO on a packed task (minutes on a laptop); ARGS="steps=10 ..."
	$(RUN) recipes/grpo.py model=qwen3_5_dense packing=thd $(ARGS)

sweep: install ## the four sharding strategies on 4 ranks, for the notebooks (about 5 minutes); ARGS="steps=50 ..."
	$(RUN) recipes/grpo.py -m sweep=laptop $(ARGS)

notebook: install ## open the notebooks, on the newest runs in outputs/grpo
	$(RUN) -m pip install --disable-pip-version-check -r requirements-notebooks.txt
	$(RUN) -m jupyterlab notebooks/mfu_curves.ipynb

pictures: install ## docs/pictures from the newest sweep, by running the notebooks
	PICTURES=$(CURDIR)/docs/pictures $(VENV)/bin/jupyter-execute notebooks/mfu_curves.ipynb notebooks/sharding_sweep.ipynb

test: install ## the tests for everyone: no GPU, no network
	$(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: install ## real weights and other environments
	$(RUN) -m pytest -m slow $(ARGS)

test-gpu: install ## needs one CUDA device and requirements-gpu.txt
	$(RUN) -m pytest -m gpu $(ARGS)

COMPAT ?= 5.14.1 5.15.0 5.17.0 5.19.0 5.23.0

test-compat: install ## the packing tests on other versions of transformers; COMPAT="5.17.0 ..."
	$(RUN) tests/compat.py $(COMPAT)

lint: install ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

same: install ## every metric of four small runs, exactly as on another commit: make same BASE=<commit>
	$(RUN) tests/same.py $(BASE) $(ARGS)

mutants: install ## plant faults one at a time and see whether the tests notice (about an hour); ARGS="optim ..."
	$(RUN) tests/mutants.py $(ARGS)

TINY := qwen3_5_dense qwen3_5_moe qwen3_next qwen3_dense
EMBEDDED := src/posttrain/models/embedded

tiny: install ## train the embedded tiny models again, from random weights to a pass rate of 0.43
	for name in $(TINY); do \
	  rm -rf outputs/tiny/$$name && \
	  $(RUN) recipes/sft.py model=$$name init=true steps=600 batch_size=128 stop_at=0.43 evaluation.every=2 \
	    evaluation.prompts=256 evaluation.temperature=1 hydra.run.dir=outputs/tiny/$$name && \
	  rm -rf $(EMBEDDED)/$$name && mkdir -p $(EMBEDDED)/$$name && \
	  install -m 644 outputs/tiny/$$name/model/* $(EMBEDDED)/$$name/ || exit 1; \
	done

bench: install ## time from the command to the first update; kernels, packing, logprobs; the meter's share of a step
	$(RUN) benchmarks/startup.py
	$(RUN) benchmarks/gdn_packing.py
	$(RUN) benchmarks/packing.py
	$(RUN) benchmarks/logprobs.py
	$(RUN) benchmarks/mfu.py

clean: ## remove the environment and caches, not outputs/
	rm -rf $(VENV) .venv-compat .pytest_cache .ruff_cache .mypy_cache .hypothesis

.PHONY: help install install-gpu train sweep notebook pictures test test-slow test-gpu test-compat lint same mutants tiny bench clean
