# The two commands that matter: `make demo` and `make test`. `make` alone lists them all.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
DEMO   := runs/demo
TARGET := data/tiny-qwen3
# Fewer than the recipe has: the demo is about minutes, not about the best tau.
DEMO_STEPS ?= 1400

# Nothing here needs a hub or reports usage to anyone.
export HF_HUB_OFFLINE := 1
export DO_NOT_TRACK := true

.DEFAULT_GOAL := help
.PHONY: help env demo test check fmt compare compare-quick clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## create .venv; quick when it is up to date

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make env PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (some minutes the first time)"
	@$(BIN)/python -m pip install -qq -c constraints/cpu.txt -e '.[dev,plots]'
	@touch $@

demo: env ## train, measure and export the tiny DFlow drafter
	rm -rf $(DEMO)
	$(BIN)/dflow-train fit --config recipes/tiny-dflow.yaml --run_dir $(DEMO) --trainer.max_steps $(DEMO_STEPS)
	$(BIN)/dflow-train export --checkpoint $(DEMO)/checkpoints/best.ckpt --out $(DEMO)/export
	$(BIN)/dflow-train bench --target $(TARGET) --drafter $(DEMO)/export --suite tiny \
		--temperature 0,1 --json $(DEMO)/bench.json
	$(BIN)/dflow-train report --bench $(DEMO)/bench.json --out $(DEMO)/report.html
	@echo
	@echo "drafter    $(DEMO)/export"
	@echo "report     $(DEMO)/report.html"
	@echo "dashboard  $(BIN)/dflow-train ui --run $(DEMO)"

test: env ## run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m "not gpu"

check: env ## lint, format, types and the fast tests: before every commit
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m "not gpu and not slow"

fmt: env ## format and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

compare: env ## DFlash, DFlash+SC and DFlow, three seeds each, with the fairness rows
	$(BIN)/python scripts/compare.py

compare-quick: env ## the same with one seed and few steps: does the harness work?
	$(BIN)/python scripts/compare.py --quick

clean: ## remove caches; keeps .venv and runs
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
