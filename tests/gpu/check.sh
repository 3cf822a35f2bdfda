#!/usr/bin/env bash
# What only a GPU can show, on one of 40 GB or more, in 8 minutes at most; ends with one page of
# numbers. NOT RUN on a GPU yet: the first page will say what each step takes.
#
#   tests/gpu/check.sh                  # the page is in runs/gpu-check/page.txt, too: send it to us
#   tests/gpu/check.sh --device cpu     # tiny shapes, 2 minutes: does the script itself work?
#   tests/gpu/check.sh --dry            # the commands alone
#
# A training step at Qwen3-1.7B's shape with flex attention's backward pass beside a dense mask;
# ZeRO 2 and 3 with rollouts in bfloat16, in one process; validation; export; bench on the device,
# eager and compiled, with the split of a round's time; the tests marked `gpu`.
# Exit status 1 when a step fails.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=true PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
device=cuda accelerator=gpu slower=1 dry=
case "$*" in
    "") ;;
    "--device cpu") device=cpu accelerator=cpu slower=10 ;;
    "--dry") dry=1 ;;
    *) echo "usage: tests/gpu/check.sh [--device cpu | --dry]" >&2; exit 2 ;;
esac
out=runs/gpu-check
status=0
gpu_only='bench-compiled|tests' # C++ takes minutes to compile; the tests marked `gpu` want CUDA

# step NAME SECONDS LINES COMMAND...: runs it under a time limit; the page has its last lines.
step() {
    local name=$1 limit=$2 lines=$3 start=$SECONDS word=ok
    shift 3
    if [[ -n $dry ]]; then printf '%q ' "$@"; echo; return; fi
    if [[ $device == cpu && $name =~ ^($gpu_only)$ ]]; then
        echo "== $name: skipped, for a GPU alone" | tee -a "$out/page.txt"
        return
    fi
    timeout $((limit * slower)) "$@" >"$out/$name.log" 2>&1 || { word=FAILED status=1 lines=25; }
    { echo "== $name: $word, $((SECONDS - start)) s"; tail -n "$lines" "$out/$name.log"; } | tee -a "$out/page.txt"
}

train=("$PYTHON" -m dflow_lightning fit --config recipes/tiny-dflow.yaml
    --trainer.accelerator "$accelerator" --trainer.precision bf16-mixed --model.target.dtype bfloat16
    --trainer.val_check_interval 10 --validation.prompts_per_family 1
    --validation.max_new_tokens 16 --tracking.enabled false)
bench=("$PYTHON" -m dflow_lightning bench --target data/tiny-qwen3 --drafter data/tiny-drafters/dflash
    --drafter data/tiny-drafters/dflow --suite tiny --per_family 4 --device "$device")

if [[ -z $dry ]]; then rm -rf "$out"; mkdir -p "$out"; fi
step machine 20 4 "$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
step training-step 170 14 "$PYTHON" tests/gpu/training_step.py --device "$device" --out "$out/training-step.json"
step zero2 50 8 "${train[@]}" --run_dir "$out/zero2" --trainer.strategy zero2 --trainer.max_steps 20
step zero2-resumed 30 8 "${train[@]}" --run_dir "$out/zero2" --trainer.strategy zero2 --trainer.max_steps 30 --ckpt_path last
step zero3 40 8 "${train[@]}" --run_dir "$out/zero3" --trainer.strategy zero3 --trainer.max_steps 20
step export 20 4 "$PYTHON" -m dflow_lightning export --checkpoint "$out/zero2/checkpoints/last.ckpt" --out "$out/export"
step bench 40 12 "${bench[@]}" --json "$out/bench.json"
step bench-compiled 80 12 "${bench[@]}" --backend compiled
step tests 30 3 "$PYTHON" -m pytest -q -m gpu tests
if [[ -z $dry ]]; then echo "== all: $SECONDS s, exit status $status" | tee -a "$out/page.txt"; fi
exit $status
