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
# DeepSpeed's pair only where it is installed.
"$python" -m benchmarks.one_device --device cuda --model transformer-1b --rows 8 --length 1024 \
  --pairs zero0:plain,zero1:plain,zero0-low:plain-low,zero1-low:plain-low \
  --out "$out/one_device.json" | tee "$out/one_device.txt" || status=1
"$python" -m benchmarks.one_device --device cuda --model transformer-1b --rows 16 --length 1024 --rounds 4 \
  --pairs zero2:zero2-optimizer,zero3-offload:fsdp2-offload --out "$out/offload.json" | tee "$out/offload.txt" || status=1
if "$python" -c 'import deepspeed' 2> /dev/null; then
  "$python" -m benchmarks.one_device --device cuda --model transformer-1b --rows 16 --length 1024 --rounds 4 \
    --pairs zero3-offload:deepspeed3-offload --out "$out/deepspeed.json" | tee "$out/deepspeed.txt" || status=1
fi
exit $status
