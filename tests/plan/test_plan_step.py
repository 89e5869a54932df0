"""The step that the planner proves is the one that training runs: the same actions, in the same order."""

from types import SimpleNamespace

import pytest
import torch
from harness import recorded_actions
from measured import layout_of

from longstraw_megatron.bench.workload import make_groups
from longstraw_megatron.comm import Traffic
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.mcore.architectures import architecture_of, pipeline_layout
from longstraw_megatron.mcore.group_work import GroupWork, cut_group
from longstraw_megatron.mcore.model import recompute_settings
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.session import build_trainer, learner_options
from longstraw_megatron.mcore.step_plan import plan_step
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import plan_memory
from longstraw_megatron.schedule import check_plan, make_plan
from longstraw_megatron.testing import run_ranks

LIVE = "schedule.max_live_prefixes=2"
# uneven stages; a last segment of its own length; blocks of a long response
WORKLOADS = {
    "glm_pp4": f"model=glm_5_2 parallel.pp=4 prompt_length=262144 segment_length=16384 group_size=16 {LIVE}",
    "glm_tp8_pp4": f"model=glm_5_2 parallel=glm_32gpu_tp8_pp4_ep8 prompt_length=262144 segment_length=16384 {LIVE}",
    "qwen_vpp2_blocks": "model=qwen3_6_27b parallel.pp=4 parallel.vpp=2 parallel.cp=2 prompt_length=40000 "
    f"segment_length=4096 response_length=5000 response_block=1024 recompute=full {LIVE}",
    "qwen_detached": f"model=qwen3_6_27b parallel.pp=3 prompt_length=9000 segment_length=4096 gradient=detached {LIVE}",
    "qwen_one_rank": "model=tiny_qwen_hybrid prompt_length=1000 segment_length=300",
}


def _learners_step(layout: Layout, num_groups: int):
    """What `plan_step` makes of a learner's works, cut with a learner's options."""
    config, parallel = layout.config, layout.config.parallel
    context = SimpleNamespace(row_multiple=parallel.tp if parallel.sp else 1, device=torch.device("cpu"))
    options = learner_options(config, context)
    cut = cut_group(layout.group, options.cut, cp_size=parallel.cp)
    work = {"cp_rank": 0, "num_chunks": parallel.vpp, "device": context.device, "traffic": Traffic()}
    transformer_config = architecture_of(config.model.hf_config).transformer_config(
        layout.hf,
        pipeline_model_parallel_size=parallel.pp,
        pipeline_model_parallel_layout=pipeline_layout(layout.hf, pp=parallel.pp, vpp=parallel.vpp),
        pipeline_dtype=torch.bfloat16,
        **recompute_settings(config.recompute),
    )
    return plan_step(
        [GroupWork(layout.group, cut, options.state, **work) for _ in range(num_groups)],
        config=transformer_config,
        pp_size=parallel.pp,
        vpp_size=parallel.vpp,
        exact=options.state.exact,
        forward_only=False,
        max_live_prefixes=options.max_live_prefixes,
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_plan_is_the_learners(name):
    layout = layout_of(WORKLOADS[name].split())
    planned, run = layout.step_plan(2), _learners_step(layout, 2)
    assert planned.plan == run.plan
    assert planned.report == run.report


def test_stage_inputs_are_counted_of_the_plan_that_runs():
    layout = layout_of(WORKLOADS["glm_pp4"].split())
    report = _learners_step(layout, 2).report
    plain = check_plan(make_plan(layout.description(2)), layout.description(2))
    # with every action as long as the next, later stages would keep fewer
    assert sum(report.peak_kept_inputs) > sum(plain.peak_kept_inputs)
    item = layout.segment_rows * layout.shape.hidden * layout.shape.itemsize
    for r, stage in enumerate(plan_memory(layout, num_groups=2).stages):
        kept = report.peak_kept_inputs[r] * (r > 0)  # those of the first stage are tokens
        assert stage.phases["walk"][Item.STAGE_INPUTS] == (kept + report.peak_held_inputs[r]) * item


def _executed(rank, world_size, words):
    """The actions that a rank's learner runs for two groups of the workload."""
    config = resolve_auto(load_config(words), cuda_available=False)
    context = init_parallel(config.parallel, device=torch.device("cpu"), seed=1, timeout_s=240)
    groups = make_groups(config, 2)
    learner = build_trainer(config, groups, context).learner
    executed = recorded_actions(learner)
    learner.compute_gradients(groups)
    return executed


def test_ranks_run_the_plan():
    words = ["model=tiny_qwen_hybrid", "parallel.pp=2", "prompt_length=700", "segment_length=128", "recompute=full"]
    words += ["response_length=16", "group_size=6", "parallel.stages=[3,5]", LIVE]
    layout = layout_of(words)
    planned = layout.step_plan(2).plan
    assert planned != make_plan(layout.description(2))
    assert run_ranks(2, _executed, words, timeout=240) == planned
