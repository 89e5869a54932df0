"""The GLM layer seams on Megatron's modules: names, the pass that carries selection and routes, what is refused."""

import dataclasses

import harness
import pytest
import torch
from hf_models import GLM, build, make, megatron_logits, tokens
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.mcore.architectures import architecture_of
from longstraw_megatron.mcore.head import hidden_only
from longstraw_megatron.mcore.model import BuildOptions, build_model
from longstraw_megatron.mcore.moe import SegmentMoELayer, SegmentRouter, check_moe
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.mcore.sparse_attention import SegmentDSAttention, freeze_indexer
from longstraw_megatron.segments.segment import Mode, positions_of
from longstraw_megatron.state import PrefixState, StateOptions
from longstraw_megatron.testing import run_ranks

HF = make("glm", num_hidden_layers=6).config.to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]}
SPARSE_LAYERS = [2, 3, 4, 5, 6]
SOURCES, LAST_SOURCE = [1, 3, 5], 5  # index_topk_freq 2, offset 1


def one_rank(test):
    """Run the test's body in a forked rank, where Megatron's groups and patches end with the process."""

    def run(rank, world_size):
        test(init_parallel(harness.Layout().parallel, device=torch.device("cpu"), seed=1, timeout_s=60))

    def wrapper():
        run_ranks(1, run)

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper


def our_model(context, recompute="none"):
    """One chunk with small random weights that are the same in every build."""
    (model,) = build_model(HF, BuildOptions("fp32", recompute), context)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 1.0))
    return model


def make_pass(mode, state, *, index=0, start=0, lengths=(24,), prefix_rows=0, multiple=1, **fields):
    layout = cut_sequences(lengths, multiple=multiple)
    return SegmentPass(
        mode=mode, index=index, start=start, prefix_rows=prefix_rows, layout=layout, cp_rank=0, state=state,
        positions=positions_of(layout, 0, start), **fields,
    )  # fmt: skip


def run_pass(model, segment, seed=3):
    ids = torch.randint(1, GLM["vocab_size"], (1, segment.rows), generator=torch.Generator().manual_seed(seed))
    embedded = model.embedding(ids, None)
    if segment.mode is not Mode.PREFILL:
        embedded = embedded.detach().requires_grad_()
    return model(
        ids, None, None, decoder_input=embedded, packed_seq_params=segment, output_processor=hidden_only
    )  # fmt: skip


@one_rank
def test_parameters_and_buffers_are_megatrons(context):
    ours, (stock,) = our_model(context), build(HF, context.groups)
    assert list(ours.state_dict()) == list(stock.state_dict())
    shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model in (ours, stock)]
    assert shapes[0] == shapes[1]
    layers = ours.decoder.layers
    assert all(isinstance(layer.self_attention.core_attention, SegmentDSAttention) for layer in layers)
    moe = [layer.layer_number for layer in layers if isinstance(layer.mlp, SegmentMoELayer)]
    assert moe == SPARSE_LAYERS
    assert all(isinstance(layer.mlp.router, SegmentRouter) for layer in layers if layer.layer_number in moe)
    with_indexer = [layer.layer_number for layer in layers if layer.self_attention.core_attention.indexer is not None]
    assert with_indexer == SOURCES


@one_rank
def test_without_a_pass_the_model_is_megatrons(context):
    ours, (stock,) = our_model(context), build(HF, context.groups)
    stock.load_state_dict(ours.state_dict())
    ids = tokens()
    want, got = megatron_logits(stock.train(), ids), megatron_logits(ours, ids)
    assert torch.equal(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    for name, parameter in stock.named_parameters():
        mine = dict(ours.named_parameters())[name]
        assert (parameter.grad is None) == (mine.grad is None), name
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, mine.grad), name


@one_rank
def test_only_the_indexers_are_frozen(context):
    model = our_model(context)
    frozen = sorted(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    assert frozen == sorted(name for name, _ in model.named_parameters() if ".indexer." in name)
    assert len(frozen) == 5 * len(SOURCES)
    model.requires_grad_(True)
    assert sorted(freeze_indexer(model)) == frozen


@one_rank
def test_selection_stays_on_the_pass_to_the_end_of_backward(context):
    """Also under recompute, which reaches layers that share a selection before the layer that made it."""
    model = our_model(context, recompute="full")
    state = PrefixState(StateOptions(exact=True), num_rows=24)
    prefill = make_pass(Mode.PREFILL, state)
    with torch.no_grad():
        run_pass(model, prefill)
    assert list(prefill.topk) == [LAST_SOURCE]  # earlier ones are of no more use without a graph
    replay = make_pass(Mode.REPLAY, state, index=1, start=24, lengths=(5, 9), prefix_rows=24)
    hidden = run_pass(model, replay, seed=4)
    assert sorted(replay.topk) == SOURCES
    made = {layer: (positions, positions.clone()) for layer, positions in replay.topk.items()}
    hidden.sum().backward()
    for layer, (positions, copy) in made.items():
        assert replay.topk[layer] is positions
        assert torch.equal(positions, copy)
        assert positions.dtype == torch.int32 and positions.shape == (14, GLM["index_topk"])


@one_rank
def test_layer_without_its_source_says_so(context):
    model = our_model(context)
    shared = model.decoder.layers[1].self_attention.core_attention
    segment = make_pass(Mode.REPLAY, PrefixState(StateOptions(exact=True)), lengths=(4,))
    dim = GLM["kv_lora_rank"] + GLM["qk_rope_head_dim"]
    with pytest.raises(RuntimeError, match="Layer 2 shares the selection of layer 1, which has not run"):
        shared(torch.zeros(4, 4, dim), torch.zeros(4, 1, dim), None, None, None, None, packed_seq_params=segment)


def map_of(experts):
    return torch.zeros(len(experts), GLM["n_routed_experts"], dtype=torch.bool).scatter(1, experts.long(), True)


@one_rank
def test_routes_of_prompt_tokens_are_recorded_and_taken_again(context):
    model = our_model(context)
    router, state = model.decoder.layers[3].mlp.router, PrefixState(StateOptions(exact=True), num_rows=24)
    with torch.no_grad():
        run_pass(model, make_pass(Mode.PREFILL, state, multiple=5))
    assert sorted(state.experts) == [(layer, 0) for layer in SPARSE_LAYERS]
    recorded = state.experts[4, 0]
    assert recorded.dtype == torch.uint8 and recorded.shape == (25, 2)  # padding goes somewhere, the same way again
    logits = torch.randn(25, 1, GLM["n_routed_experts"], requires_grad=True)
    free, _ = router.routing(logits, make_pass(Mode.REPLAY, state, multiple=5))
    gates, routing_map = router.routing(logits, make_pass(Mode.WALK, state, multiple=5))
    assert torch.equal(routing_map, map_of(recorded))
    assert not torch.equal(free > 0, routing_map)
    scores = torch.sigmoid(logits[:, 0]) * routing_map
    want = scores / scores.sum(-1, keepdim=True) * HF["routed_scaling_factor"]
    assert torch.allclose(gates, want, atol=1e-6)
    (grad,) = torch.autograd.grad((gates * torch.randn_like(gates)).sum(), logits)
    assert (grad[:, 0][routing_map] != 0).all() and not grad[:, 0][~routing_map].any()
    state.truncate(num_rows=0, boundary=0)
    assert not state.experts


@one_rank
def test_detached_prompts_record_no_routes(context):
    model, state = our_model(context), PrefixState(StateOptions(exact=False), num_rows=24)
    with torch.no_grad():
        run_pass(model, make_pass(Mode.PREFILL, state))
    assert not state.experts


@one_rank
def test_a_branch_routes_as_at_its_first_forward(context):
    router, state = our_model(context).decoder.layers[3].mlp.router, PrefixState(StateOptions(exact=True))
    first, later = make_pass(Mode.REPLAY, state), make_pass(Mode.REPLAY, state)
    logits = torch.randn(2, 24, 1, GLM["n_routed_experts"])
    with torch.no_grad():
        _, first_map = router.routing(logits[0], first)
    _, other_map = router.routing(logits[1], later)  # another microbatch in between
    _, again = router.routing(logits[1], first)  # recompute, with scores that would route elsewhere
    assert torch.equal(again, first_map) and not torch.equal(other_map, first_map)
    assert torch.equal(map_of(first.experts[4]), first_map)
    assert not state.experts
    assert not router.local_tokens_per_expert.any()  # the counts that move the bias are left alone


@one_rank
def test_routes_that_come_with_the_rollouts_are_taken(context):
    router, state = our_model(context).decoder.layers[3].mlp.router, PrefixState(StateOptions(exact=True))
    given = torch.stack([torch.randperm(GLM["n_routed_experts"])[:2] for _ in range(26)]).to(torch.uint8)
    given[24:] = 3  # whatever the padding holds, it gets distinct experts
    segment = make_pass(Mode.REPLAY, state, multiple=13, routed_experts={4: given})
    _, routing_map = router.routing(torch.randn(26, 1, GLM["n_routed_experts"]), segment)
    assert torch.equal(routing_map[:24], map_of(given[:24]))
    assert torch.equal(routing_map[24:], map_of(torch.tensor([[0, 1], [0, 1]])))

    class SecondOfTwo:
        def rank(self):
            return 1

    router.tp_group = SecondOfTwo()  # sequence parallelism: this rank routes rows 13 to 25
    segment = make_pass(Mode.REPLAY, state, multiple=13, routed_experts={4: given})
    _, part = router.routing(torch.randn(13, 1, GLM["n_routed_experts"]), segment)
    assert torch.equal(part, routing_map[13:])


def moe_config(**changes):
    return architecture_of(HF).transformer_config(HF, **changes)


REFUSED = {
    "aux loss": {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"},
    "one of several aux losses": {
        "moe_aux_loss_coeff": [0.0, 0.01], "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    },
    "z loss": {"moe_z_loss_coeff": 0.001},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "jitter": {"moe_input_jitter_eps": 0.1},
    "bias update": {"moe_router_bias_update_rate": 0.001},
    "Megatron's replay": {"moe_enable_routing_replay": True},
    "fused router": {"moe_router_fusion": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "forced balance": {"moe_router_force_load_balancing": True},
    "MLP in pieces": {"mlp_chunks_for_training": 2},
    "MoE recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_exact_gradients_is_refused(name):
    changes = REFUSED[name]
    config = moe_config()
    for field, value in changes.items():  # Megatron's own checks of some of them are not what is tested
        setattr(config, field, value)
    named = "|".join(changes)
    with pytest.raises(RefusedError, match=f"^({named}) got .*, wanted "):
        check_moe(config)
    with pytest.raises(RefusedError):
        SegmentMoELayer(config, None)


def test_settings_of_the_architecture_are_accepted():
    check_moe(moe_config())
    check_moe(moe_config(recompute_granularity="selective", recompute_modules=["core_attn", "shared_experts"]))
    check_moe(dataclasses.replace(moe_config(), num_moe_experts=None, moe_shared_expert_intermediate_size=None))


@pytest.mark.parametrize("field, value", [("dsa_indexer_loss_coeff", 0.001), ("dsa_indexer_scoring_relu", False)])
def test_indexers_that_are_not_ours_are_refused(field, value):
    config = moe_config()
    setattr(config, field, value)
    with pytest.raises(RefusedError, match=f"{field} got {value}, wanted "):
        SegmentDSAttention(config)


def test_a_router_of_someone_else_is_refused():
    class OtherRouter(TopKRouter):
        pass

    @dataclasses.dataclass
    class Submodules:
        router: type = OtherRouter

    assert issubclass(SegmentMoELayer, MoELayer)
    with pytest.raises(RefusedError, match="router got OtherRouter, wanted Megatron's TopKRouter"):
        SegmentMoELayer(moe_config(), Submodules())


def test_hf_model_of_these_tests_shares_selections():
    assert [i + 1 for i, kind in enumerate(HF["indexer_types"]) if kind == "full"] == SOURCES
