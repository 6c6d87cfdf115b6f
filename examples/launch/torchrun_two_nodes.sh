#!/usr/bin/env bash
# Fine-tunes the digit classifier on several machines. Start it on each of them, with the same address and port:
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 examples/launch/torchrun_two_nodes.sh
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 examples/launch/torchrun_two_nodes.sh
#
# MASTER_ADDR is an address of the machine with NODE_RANK=0 that the others can reach. Set NPROC_PER_NODE to the number
# of GPUs of each machine. Where a machine has several networks, say which one to use: GLOO_SOCKET_IFNAME or
# NCCL_SOCKET_IFNAME, e.g. eth0. Arguments go to the example.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${NNODES:=2}" "${NODE_RANK:?}" "${MASTER_ADDR:?}" "${MASTER_PORT:=29500}" "${NPROC_PER_NODE:=1}" "${PYTHON:=python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Your own script instead of the example, in the last line: train.py, whose Trainer has
# num_nodes=int(os.environ["GROUP_WORLD_SIZE"]) and devices=int(os.environ["LOCAL_WORLD_SIZE"]).
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    examples/finetune_digits.py --num-nodes "$NNODES" --devices "$NPROC_PER_NODE" "$@"
