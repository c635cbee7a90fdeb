#!/usr/bin/env bash
# On every host, at any time: RDZV_HOST=first-host FOLDER=/shared/run examples/cluster/torchrun_elastic.sh
# Training begins with the first host that is there, and begins anew from the last checkpoint whenever one comes or goes.
set -euo pipefail

RDZV_HOST=${RDZV_HOST:?the host that the others ask who takes part, such as the first one}
FOLDER=${FOLDER:?where checkpoints go: on a file system that all hosts see}
RDZV_PORT=${RDZV_PORT:-29400}
RUN_ID=${RUN_ID:-zero-gpt}                         # the same on all hosts, another one for every run
NNODES=${NNODES:-1:4}                              # fewest and most hosts
GPUS_PER_NODE=${GPUS_PER_NODE:-8}                  # on a machine without GPUs: processes
REPOSITORY=${REPOSITORY:-$(cd "$(dirname "$0")/../.." && pwd)}

# A host that comes is a new round, one that is lost a failure; both use up restarts. --batch-size has to be a multiple of
# every number of ranks that there may be: 96 of 8, 16, 24 and 32.
exec torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --max-restarts "${MAX_RESTARTS:-100}" \
    --rdzv-id "$RUN_ID" --rdzv-backend c10d --rdzv-endpoint "$RDZV_HOST:$RDZV_PORT" \
    --rdzv-conf "join_timeout=3600,last_call_timeout=30" \
    "$REPOSITORY/examples/cluster_gpt.py" --folder "$FOLDER" --stage 3 --steps 10000 --save-every 200 \
    --batch-size "${BATCH_SIZE:-96}" --timeout-seconds 300 "$@"
