#!/bin/sh
# From nothing to a serving model: pull, export, quantize (each only if its result is not there), serve.
# Usage: run.sh MODELS_DIR RECIPE PORT; `qwenonnx` must be on the PATH.
set -eu
models=$1 recipe=$2 port=$3

checkpoint=$(qwenonnx pull --models-dir "$models")
model=$(dirname "$checkpoint")
if [ ! -e "$model/$recipe/qwenonnx.json" ]; then
    if [ ! -e "$model/fp32/qwenonnx.json" ]; then
        echo "exporting $checkpoint to ONNX (about 2 GB of disk)" >&2
        qwenonnx export "$checkpoint" --output "$model/fp32" >/dev/null
    fi
    echo "quantizing $model/fp32 with the recipe $recipe" >&2
    qwenonnx quantize "$model/fp32" --recipe "$recipe" --output "$model/$recipe" >/dev/null
fi
echo "starting the server with $model/$recipe" >&2
exec qwenonnx serve "$model/$recipe" --port "$port"
