#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the CUDA ops are built, then the tests marked gpu and the benchmarks run.
# Usage: scripts/gpu_check.sh [folder for results]
set -eu -o pipefail
cd "$(dirname "$0")/.."
out=${1:-outputs/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
"$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))' | tee "$out/machine.txt"
"$python" -m zero_strategy.cli build --cuda --verbose | tee "$out/build.txt"
"$python" -m zero_strategy.cli doctor | tee "$out/doctor.txt"
status=0
"$python" -m pytest -m gpu tests -q | tee "$out/tests.txt" || status=1
"$python" -m benchmarks.ops --device cuda --rows 16384 --columns 4096 --numel 100000000 --tensors 100 \
  --json "$out/ops.json" | tee "$out/ops.txt" || status=1
for shape in "512 16" "2048 4"; do
  read -r length batch <<< "$shape"
  "$python" -m benchmarks.transformer_layer --device cuda --dtype bf16 --hidden 1024 --length "$length" --batch "$batch" \
    --suites layer options stochastic compiled loss | tee "$out/transformer_layer_$length.txt" || status=1
done
"$python" -m benchmarks.offload --folder "$out" --suites device --device cuda --model transformer-1b --rows 16 --length 1024 \
  --out "$out/offload.json" | tee "$out/offload.txt" || status=1
exit $status
