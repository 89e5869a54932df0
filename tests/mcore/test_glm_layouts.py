"""GLM in parallel layouts: every parameter's gradient on every rank, loss and gradient norm, against Hugging Face's,
with 4 index heads and old logprobs that are not the present ones.

Seven layers have every kind (dense and experts, own and shared top-k); pipelines cut eleven. Three groups of different
shape, so that data-parallel ranks of one expert group run in lockstep, one of them longer than the others or without
any group.
"""

import functools

import pytest
from glm_oracle import glm_truth
from harness import Layout, after_updates, assert_equals_oracle, make_groups, names_of, run_exact_and_detached
from oracle import glm_config, make_model

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import pipeline_layout

ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
LAYOUTS = {
    "cp2": Layout(cp=2, segment_length=24),
    "cp2_contiguous_packed": Layout(cp=2, segment_length=24, style="contiguous", branches_per_microbatch=3),
    "cp3": Layout(cp=3, segment_length=24),
    "cp4_recompute": Layout(cp=4, segment_length=24, recompute="full", branches_per_microbatch=2),
    "cp8": Layout(cp=8, segment_length=40, branches_per_microbatch=3),
    "tp2_sp": Layout(tp=2, segment_length=24),
    "tp2_sp_recompute": Layout(tp=2, segment_length=24, recompute="full"),
    "dp2": Layout(dp=2, segment_length=24),
    "ep2": Layout(dp=2, ep=2, segment_length=24),
    "ep2_recompute": Layout(dp=2, ep=2, segment_length=24, recompute="full"),
    "ep2_allgather": Layout(dp=2, ep=2, segment_length=24, changes=ALLGATHER),
    "ep4_a_rank_without_group": Layout(dp=4, ep=4, segment_length=32),
    "ep4_allgather": Layout(dp=4, ep=4, segment_length=32, recompute="full", changes=ALLGATHER),
    "tp2_sp_ep2": Layout(tp=2, dp=2, ep=2, segment_length=24),
    "tp2_sp_etp2": Layout(tp=2, etp=2, segment_length=24),
    "etp2_over_dp2": Layout(etp=2, dp=2, segment_length=24),
    "tp2_sp_cp2": Layout(tp=2, cp=2, segment_length=24),
    "cp2_ep2": Layout(cp=2, ep=2, segment_length=24),
    "cp4_ep4": Layout(cp=4, ep=4, segment_length=40),
    "pp2": Layout(pp=2, segment_length=16),
    "pp4_recompute": Layout(pp=4, segment_length=16, recompute="full", branches_per_microbatch=2),
    "pp2_vpp2": Layout(pp=2, vpp=2, segment_length=16, stages=(2, 4, 4, 1)),
    "pp2_ep2": Layout(pp=2, dp=2, ep=2, segment_length=16),
    "pp2_cp2_ep2": Layout(pp=2, cp=2, ep=2, segment_length=16),
    "tp2_sp_pp2_ep2": Layout(tp=2, pp=2, ep=2, segment_length=16),
    "cp2_ep2_dp2": Layout(cp=2, ep=2, dp=2, segment_length=24, branches_per_microbatch=3),
}


@functools.cache
def _case(num_layers: int):
    """Model, groups, and what dense training gives: (exact, detached)."""
    model = make_model(glm_config(index_n_heads=4, num_hidden_layers=num_layers))
    groups = make_groups((60, [12, 1, 17]), (1, [5]), (20, [8, 3]))
    groups = after_updates(groups, glm_truth(model, groups))
    return model, groups, (glm_truth(model, groups), glm_truth(model, groups, detached=True))


WIDE = ("cp2_contiguous_packed", "cp3", "tp2_sp_recompute", "ep2_recompute", "ep4_allgather", "tp2_sp_etp2")


@pytest.mark.parametrize("name", names_of(LAYOUTS, wide=WIDE))
def test_gradients_are_those_of_full_sequences_and_of_a_detached_cache(name):
    layout = LAYOUTS[name]
    model, groups, dense = _case(11 if layout.pp > 1 else 7)
    for results, truth in zip(run_exact_and_detached(layout, model, *dense, groups), dense, strict=True):
        assert_equals_oracle(results, truth)


def test_stages_that_share_top_k_are_refused_with_the_legal_starts():
    hf = glm_config().to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]}
    with pytest.raises(RefusedError, match=r"begin at layers \[4\].*wanted some of \[0, 1, 2, 6, 10\]; \[6, 5\] does"):
        pipeline_layout(hf, pp=2, vpp=1, stages=(4, 7))
