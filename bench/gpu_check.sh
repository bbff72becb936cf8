#!/usr/bin/env bash
# On a machine with a GPU, in one call of under 6 minutes: the kernels against their twins
# (float32 and bfloat16), then the latency table with CUDA graphs.
#
#     bash bench/gpu_check.sh [FOLDER]        # writes gpu_check.json there (default runs/gpu_check)
set -u
cd "$(dirname "$0")/.."
out=${1:-runs/gpu_check}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_INTERPRET=0
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv
python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__, \
"cuda", torch.version.cuda, "capability", torch.cuda.get_device_capability())' || exit 1

timeout 190 python3 -m pytest -q --durations=5 -p no:cacheprovider -k "kernel and not compile" \
    test_dspine.py 2>&1 | tee "$out/correctness.log"
correct=${PIPESTATUS[0]}
timeout 150 python3 bench/latency.py --devices cuda --kernels on --seconds 8 \
    --json "$out/latency.json"
timed=$?

python3 - "$out" "$correct" "$timed" <<'PY'
import json, os, subprocess, sys
from pathlib import Path

import torch
import triton

out, correct, timed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
log = (out / "correctness.log").read_text(encoding="utf-8").strip().splitlines()
table = out / "latency.json"
part = out / "gpu_check.json.part"
part.write_text(json.dumps({
    "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
    "cuda": torch.version.cuda, "correct": correct == 0, "tests": log[-1] if log else "",
    "failed": [line for line in log if line.startswith("FAILED")], "timed": timed == 0,
    "latency": json.loads(table.read_text(encoding="utf-8")) if table.exists() else None},
    indent=1) + "\n", encoding="utf-8")
os.replace(part, out / "gpu_check.json")
print(f"correct: {correct == 0}, timed: {timed == 0}, written: {out / 'gpu_check.json'}")
PY
[ "$correct" = 0 ] && [ "$timed" = 0 ]
