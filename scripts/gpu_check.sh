#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests marked gpu, then the step benchmark.
# Usage: scripts/gpu_check.sh [folder for results]
set -eu
cd "$(dirname "$0")/.."
out=${1:-outputs/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
"$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))' | tee "$out/machine.txt"
"$python" -m pytest -m gpu tests -q | tee "$out/tests.txt"
