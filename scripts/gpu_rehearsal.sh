#!/usr/bin/env bash
# scripts/gpu_check.sh, tried without a GPU in what the machine with one has: its packages, a few carried wheels, no
# network. Usage: scripts/gpu_rehearsal.sh TORCH_VERSION ENVIRONMENT [arguments of gpu_check.sh]
# PYTHON names the interpreter that makes the environment (default: python3).
set -eu
cd "$(dirname "$0")/.."
version=$1 environment=$2
shift 2
wheels=$environment/wheels site=$environment/carried
most=$((64 << 20)) # bytes that travel to the machine with the repository

if ! test -e "$environment/.made"; then
  "${PYTHON:-python3}" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" -r scripts/gpu_machine.txt
  # antlr comes as source only: built here, for there is nothing to build it with there.
  "$environment/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" \
    'omegaconf>=2.3,<2.4' 'hydra-core>=1.3,<1.4' 'antlr4-python3-runtime==4.9.3' 'zstandard>=0.22'
  touch "$environment/.made"
fi

carried=$(du -cb "$wheels"/*.whl | tail -1 | cut -f1)
tree=$(git ls-files -z --cached --others --exclude-standard | du -cb --files0-from=- 2> /dev/null | tail -1 | cut -f1)
echo "repository $((tree >> 10)) KiB, wheels $((carried >> 10)) KiB, of $((most >> 10)) KiB that may travel"
test $((tree + carried)) -lt $most

"$environment/bin/python" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$wheels"/*.whl
export PYTHONPATH=$site PYTHON=$environment/bin/python PATH="$environment/bin:$PATH" OMP_NUM_THREADS=1
export ZERO_STRATEGY_CACHE=$environment/ops HF_HUB_OFFLINE=1
run=(scripts/gpu_check.sh --rehearse --out "$environment/results" "$@")
if unshare --net --map-root-user true 2> /dev/null; then
  exec unshare --net --map-root-user bash -c 'ip link set lo up; exec "$@"' bash "${run[@]}"
fi
echo "no namespace can be made here: the rehearsal has a network" >&2
exec "${run[@]}"
