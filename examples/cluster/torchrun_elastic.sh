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
LOCAL_ADDR=${LOCAL_ADDR:-}                         # this host's address, where its name does not lead to it; RDZV_HOST is one then
IS_HOST=${IS_HOST:-$([ "$LOCAL_ADDR" = "$RDZV_HOST" ] && echo 1 || echo 0)}  # with LOCAL_ADDR: 1 on RDZV_HOST
if [ -n "${INTERFACE:-}" ]; then                   # the network interface of that address, such as eth0
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
REPOSITORY=${REPOSITORY:-$(cd "$(dirname "$0")/../.." && pwd)}

# A host that comes is a new round, one that is lost a failure; both use up restarts. --batch-size has to be a multiple of
# every number of ranks that there may be: 96 of 8, 16, 24 and 32.
exec torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --max-restarts "${MAX_RESTARTS:-100}" \
    --rdzv-id "$RUN_ID" --rdzv-backend c10d --rdzv-endpoint "$RDZV_HOST:$RDZV_PORT" \
    ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    --rdzv-conf "join_timeout=3600,last_call_timeout=30${LOCAL_ADDR:+,is_host=$IS_HOST}" \
    "$REPOSITORY/examples/cluster_gpt.py" --folder "$FOLDER" --stage 3 --steps 10000 --save-every 200 \
    --batch-size "${BATCH_SIZE:-96}" --timeout-seconds 300 "$@"
