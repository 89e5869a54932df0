"""Context parallelism: the prefix is spread evenly, and a rank that dies ends the job with a reason."""

import os
import signal
from collections import Counter

import pytest
from glm_oracle import glm_truth
from harness import Layout, assert_equals_oracle, build_learner, fill_from_hf, make_groups, prompt_groups, run_layout
from oracle import glm_config, make_model, qwen_config

from longstraw_megatron.comm.failure import PeerError
from longstraw_megatron.layout.transfer import TransferShape, choose_transfer, transfer_bytes
from longstraw_megatron.schedule.actions import Op
from longstraw_megatron.testing import RankError, run_ranks

MODELS = {"qwen": (qwen_config, "Qwen3_5ForCausalLM"), "glm": (glm_config, "GlmMoeDsaForCausalLM")}


def _state_bytes(rank, world_size, layout, hf, weights, raw, detached):
    """The most that each item of the prefix state takes on this rank in a step."""
    learner, context = build_learner(layout, hf, detached=detached)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    most = Counter()

    def watch(action):
        for item, size in learner.engine.state_bytes().items():
            most[item] = max(most[item], size)

    learner.engine.progress = watch
    learner.compute_gradients(prompt_groups(raw))
    assert most["rows"]
    return dict(most)


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_a_quarter_of_the_prefix_on_each_of_four_ranks(name, detached):
    config, architecture = MODELS[name]
    model = make_model(config())
    hf = model.config.to_dict() | {"architectures": [architecture]}
    how = (hf, dict(model.state_dict()), make_groups((1025, [4])), detached)
    (whole,) = run_ranks(1, _state_bytes, Layout(segment_length=256), *how)
    for part in run_ranks(4, _state_bytes, Layout(cp=4, segment_length=256), *how):
        for item in ("rows",) if detached else ("rows", "rows_grad"):
            assert part[item] == pytest.approx(whole[item] / 4, rel=0.05), item
        # the delta rule's state is sharded too, by heads or in equal parts; only its convolution tail is whole
        if whole["boundaries"] and detached:
            tail = 6 * 3 * (2 * 32 + 96) * 4
            assert part["boundaries"] <= (whole["boundaries"] - tail) / 4 + tail + 64


@pytest.mark.parametrize("cp", [1, 2])
def test_tensor_parallel_ranks_share_latents_and_index_keys_out(cp):
    """Half of the prefix on each of two; its gradients too, which have a place for each row of a latent."""
    model = make_model(glm_config(num_hidden_layers=4))
    hf = model.config.to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]}
    how = (hf, dict(model.state_dict()), make_groups((513, [4])), False)
    (whole,) = run_ranks(1, _state_bytes, Layout(segment_length=256), *how)
    layout = Layout(tp=2, cp=cp, segment_length=256)
    for part in run_ranks(2 * cp, _state_bytes, layout, *how):
        for item in ("rows", "rows_grad"):
            assert part[item] == pytest.approx(whole[item] / 2 / cp, rel=0.05), item


def _die_in_the_walk(rank, world_size, layout, hf, weights, raw, folder):
    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)

    def die(action):
        if action.op is Op.BACKWARD and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    learner.engine.progress = die
    try:
        learner.compute_gradients(prompt_groups(raw))
    except PeerError as error:
        (folder / str(rank)).write_text(str(error))
        raise


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2), Layout(dp=2)], ids=["cp2", "pp2", "dp2"])
def test_a_killed_rank_ends_the_step_of_the_others_with_a_reason(layout, tmp_path):
    model = make_model(qwen_config(num_hidden_layers=4))
    hf = model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    raw, weights = make_groups((90, [4]), (90, [4])), dict(model.state_dict())
    with pytest.raises(RankError, match="died"):
        run_ranks(2, _die_in_the_walk, layout, hf, weights, raw, tmp_path, timeout=60)
    assert "failed on rank 0 of 2: a peer died or was silent past the timeout" in (tmp_path / "0").read_text()


def test_glm_with_a_prompt_shorter_than_top_k():
    """A prompt shorter than top-k: every earlier token is selected, on any number of ranks."""
    model = make_model(glm_config(index_topk=512))
    groups = make_groups((30, [6, 2]))
    truth = glm_truth(model, groups)
    layout = Layout(cp=4, segment_length=8, branches_per_microbatch=2)
    assert_equals_oracle(run_layout(layout, model, truth, groups), truth)


def _sent(rank, world_size, layout, hf, weights, raw):
    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    learner.compute_gradients(prompt_groups(raw))
    return dict(learner.sent)


def test_bytes_that_attention_sends_in_a_step_equal_the_formula():
    """One layer of attention; two prompt segments of 32 tokens and a branch of 16, on two ranks."""
    config = qwen_config(num_hidden_layers=4)
    hf = config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    weights = dict(make_model(config).state_dict())

    def moved(rows: int, prefix_rows: int, *, backward: bool) -> int:
        shape = TransferShape(
            cp_size=2,
            rows=rows,
            prefix_rows=prefix_rows,
            num_heads=config.num_attention_heads,
            num_key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            itemsize=4,
            sum_itemsize=4,
            prefix_grad=True,
        )
        return transfer_bytes(choose_transfer(shape, backward=backward), shape, backward=backward)

    segments, branch = [(16, 0), (16, 16)], (8, 32)  # (rows, prefix rows) of each rank
    prefill = sum(moved(*segment, backward=False) for segment in segments)
    graphs = sum(moved(*one, backward=backward) for one in (*segments, branch) for backward in (False, True))
    purposes = ("queries", "partials", "query_grads", "keys", "key_grads")
    sent = run_ranks(2, _sent, Layout(cp=2, segment_length=32), hf, weights, make_groups((65, [16])))
    for by_purpose in sent:
        assert sum(by_purpose.get(purpose, 0) for purpose in purposes) == prefill + graphs
