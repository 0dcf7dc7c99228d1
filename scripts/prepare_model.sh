#!/bin/sh
# Makes sure that the packages which the `model` tests use are there.
# Usage: prepare_model.sh MODELS_DIR MODEL; `qwenonnx` must be on the PATH.
set -eu
models=$1 model=$2

qwenonnx pull "$model" --models-dir "$models" >/dev/null
[ -e "$models/$model/fp32/qwenonnx.json" ] || qwenonnx export "$models/$model/checkpoint" --output "$models/$model/fp32" >/dev/null
for recipe in int8 int8-block int4; do
    [ -e "$models/$model/$recipe/qwenonnx.json" ] || qwenonnx quantize "$models/$model/fp32" --recipe "$recipe" >/dev/null
done
