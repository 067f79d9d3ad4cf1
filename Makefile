# Each target makes the environment by itself; any order, any number of times.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python

.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "Python 3.11 to 3.13 is needed, this is %d.%d: make PYTHON=python3.12 ..." % v)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

install: $(VENV)/installed ## make .venv and install requirements.txt

train: install ## train the embedded tiny model with GRPO on a packed task (minutes on a laptop); ARGS="steps=10 ..."
	$(RUN) recipes/grpo.py model=qwen3_5_dense packing=thd $(ARGS)

test: install ## the tests for everyone: no GPU, no network
	$(RUN) -m pytest $(ARGS)

test-slow: install ## real weights and other environments
	$(RUN) -m pytest -m slow $(ARGS)

test-gpu: install ## needs one CUDA device and requirements-gpu.txt
	$(RUN) -m pytest -m gpu $(ARGS)

lint: install ## ruff
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

tiny: install ## train the embedded tiny models again and put them into src/posttrain/models/embedded
	$(RUN) src/posttrain/models/warm_start.py

bench: install ## time the start and the step
	$(RUN) benchmarks/startup.py

clean: ## remove the environment and caches, not outputs/
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

.PHONY: help install train test test-slow test-gpu lint tiny bench clean
