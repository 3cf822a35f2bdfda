#!/usr/bin/env bash
# What only a GPU can show, in under 8 minutes: a training step at Qwen3-1.7B's shape, and the tests
# marked `gpu`. The result goes to docs/results/gpu-<name of the GPU>.json.
#
#   tests/gpu/check.sh                  # one GPU of 40 GB or more
#   tests/gpu/check.sh --device cpu     # a tiny shape: does the script itself work?
#
# Exit status 1 when a check fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=true PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
status=0
timeout 300 "$PYTHON" tests/gpu/training_step.py "$@" || status=1
if [[ "$*" != *cpu* ]]; then
    timeout 150 "$PYTHON" -m pytest -q -m gpu tests || status=1
fi
exit $status
