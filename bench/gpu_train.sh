#!/usr/bin/env bash
# On a machine with a GPU, in one call: corpus, training, evaluation and export of a slim draft.
#
#     bash bench/gpu_train.sh [FOLDER] [FLAGS ...]    # default runs/gpu; flags of train_small.py
#
# A stopped call goes on where it was. Without a network, bring the default target's file yourself:
# as FOLDER/target.gguf, or in pieces FOLDER/target.gguf.00, .01, .. (split -d -b 50M target.gguf
# target.gguf.). PIECES=15M also leaves the finished draft in pieces of that size, to carry away.
set -eu
cd "$(dirname "$0")/.."
out=${1:-runs/gpu}
shift || true
mkdir -p "$out"
export PYTHONUNBUFFERED=1
if command -v nvidia-smi > /dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
fi

target=()
if [ ! -f "$out/target.gguf" ] && [ -f "$out/target.gguf.00" ]; then
    cat "$out"/target.gguf.[0-9]* > "$out/target.part"
    mv "$out/target.part" "$out/target.gguf"
fi
[ -f "$out/target.gguf" ] && target=(--target "$out/target.gguf")

# 3 million answer tokens, 32 rows of 128 blocks a step; the published ratio of losses at the end
"${PYTHON:-python3}" train_small.py --out "$out" "${target[@]}" --slim --draft-vocab 8192 --init draft \
    --corpus-tokens 3000000 --rows 1024 --batch-rows 32 --micro-rows 16 --chunk 4096 \
    --cache-gb 40 --minutes 8 --lr 2e-3 --save-seconds 60 "$@"

if [ -n "${PIECES:-}" ]; then
    rm -f "$out"/model.safetensors.[0-9]*
    split -d -b "$PIECES" "$out/model.safetensors" "$out/model.safetensors."
fi
