#!/usr/bin/env bash
# GRPO of GLM-5.2 in LongStraw's layout, 4 nodes of 8 GPUs. It is tested as 32 CPU processes; it has not run on GPUs.
#
# Mind the memory: each parameter is trained with AdamW and takes 18 bytes (bf16 weight; float32 gradient, master weight
# and two moments). That is 418 GB on each of 32 GPUs: the released model does not fit, and takes more nodes. NNODES=32
# with parallel=glm_32gpu_pp4_cp8_ep8 parallel.ep=64 has 4 experts of each of its stage's layers on each of 256 GPUs:
# 51 GB, and 29 GB for the rest of the stage.
# Run it on every node, with paths that all nodes see:
#
#   HEAD=node0 NODE_RANK=0..3 MODEL=/data/GLM-5.2 ROLLOUTS=/data/groups.jsonl examples/glm_4x8gpu.sh [KEY=VALUE ...]
#
# Words behind the script's name are more keys and win over those here.
set -euo pipefail

: "${HEAD:?HEAD is the host name of node 0}"
: "${NODE_RANK:?NODE_RANK is the number of this node, from 0}"
: "${MODEL:?MODEL is the checkpoint folder: config.json and safetensors}"
: "${ROLLOUTS:?ROLLOUTS is the file of prompt groups, JSON lines; routed_experts in it are replayed}"
RUN=${RUN:-runs/glm_4x8gpu}

keys=(
    model.hf_path="$MODEL"
    rollouts.path="$ROLLOUTS"
    # the prompt's state over 32 ranks, and 8 experts on each; pipelines (glm_32gpu_pp4_cp8_ep8, stages of 18, 20, 20
    # and 20 layers) keep expert traffic inside a node; TP does not divide the latents
    parallel=glm_32gpu_cp32_ep32
    gradient=exact
    segment_length=32768            # 1024 tokens on each rank
    branches_per_microbatch=2
    recompute=full                  # experts included
    precision=bf16
    optimizer.lr=1e-6
    trainer.save_dir="$RUN/checkpoints"
    trainer.resume=auto
    dist.timeout_s=7200
    run_dir="$RUN"
)
exec torchrun --nnodes "${NNODES:-4}" --nproc-per-node 8 --node-rank "$NODE_RANK" --master-addr "$HEAD" \
    --master-port "${PORT:-29500}" -m longstraw_megatron.train "${keys[@]}" "$@"
