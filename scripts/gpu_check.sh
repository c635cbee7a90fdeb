#!/usr/bin/env bash
# All that one GPU can show, in one call: the CUDA ops are built, the tests marked gpu and the benchmarks run.
# scripts/gpu_check.sh --help tells the rest; PYTHON names the interpreter (default: python3).
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
