#!/usr/bin/env bash
# GRPO of Qwen3.6-27B on 4 nodes of 8 GPUs. The layout is tested as 32 CPU processes; it has not run on GPUs.
# Run it on every node, with paths that all nodes see:
#
#   HEAD=node0 NODE_RANK=0..3 MODEL=/data/Qwen3.6-27B ROLLOUTS=/data/groups.jsonl examples/qwen_4x8gpu.sh [KEY=VALUE]
#
# Words behind the script's name are more keys and win over those here.
set -euo pipefail

: "${HEAD:?HEAD is the host name of node 0}"
: "${NODE_RANK:?NODE_RANK is the number of this node, from 0}"
: "${MODEL:?MODEL is the checkpoint folder: config.json and safetensors}"
: "${ROLLOUTS:?ROLLOUTS is the file of prompt groups, JSON lines}"
RUN=${RUN:-runs/qwen_4x8gpu}

keys=(
    model.hf_path="$MODEL"
    rollouts.path="$ROLLOUTS"
    # one replica for the longest prompts: ranks are numbered TP, CP, DP, PP, so a stage's 8 ranks are one node, and
    # only hidden states cross nodes; for shorter prompts qwen_32gpu_tp4_cp2_pp2 has two replicas
    parallel=qwen_32gpu_tp2_cp4_pp4
    gradient=exact
    segment_length=16384
    branches_per_microbatch=1       # with more microbatches than stages the pipeline is full
    recompute=full
    schedule.max_live_prefixes=1    # 2 hides the bubble between groups where two prompts' states fit
    precision=bf16
    optimizer.lr=1e-6
    trainer.save_dir="$RUN/checkpoints"
    trainer.resume=auto
    dist.timeout_s=7200
    run_dir="$RUN"
)
exec torchrun --nnodes 4 --nproc-per-node 8 --node-rank "$NODE_RANK" --master-addr "$HEAD" \
    --master-port "${PORT:-29500}" -m longstraw_megatron.train "${keys[@]}" "$@"
