"""Stock Megatron models train on a CPU with gloo, in every kind of layout, as one process does."""

import re
import statistics

import megatron.core.ssm.gated_delta_net.common as gdn_common
import pytest
import stock_models
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.cpu import cpu_patches, cpu_runtime, enable_cpu_runtime, fake_rng
from longstraw_megatron.mcore.cpu_modules import DuplicatedLinear, causal_conv1d
from longstraw_megatron.mcore.patching import Patch, applied
from longstraw_megatron.testing import assert_gradients_close, run_ranks
from longstraw_megatron.testing.megatron import init_megatron, single_rank
from longstraw_megatron.testing.shards import assemble, gradient_of, load_whole, local_pieces

MODELS = ("dense", "qwen", "glm")
SP = {"sequence_parallel": True}
LAYOUTS = [  # (model, ranks, sizes, config)
    ("dense", 2, {"tp": 2}, {}),
    ("dense", 2, {"tp": 2}, SP),
    ("dense", 2, {"pp": 2}, {}),
    ("dense", 2, {"cp": 2}, {}),
    ("dense", 2, {}, {}),
    ("qwen", 2, {"tp": 2}, SP),
    ("qwen", 2, {"pp": 2}, {}),
    ("qwen", 2, {"cp": 2}, {}),
    ("glm", 2, {"tp": 2}, SP),
    ("glm", 2, {"pp": 2}, {}),
    ("glm", 2, {"cp": 2}, {}),
    ("glm", 2, {"ep": 2}, {}),
    ("glm", 2, {"ep": 2}, {"moe_token_dispatcher_type": "allgather"}),
    ("glm", 4, {"tp": 2, "ep": 2, "pp": 2}, SP),
]


def _reference(rank, world_size, name, config):
    """Whole weights, losses and gradient of one process."""
    groups = init_megatron()
    model = stock_models.build(name, groups, **config)
    stock_models.seed_weights(model)
    losses = stock_models.backward(ddp := stock_models.wrap(model, groups), groups)
    return assemble([local_pieces([model])]), losses, assemble([local_pieces([ddp], gradient_of)])


def _sharded(rank, world_size, name, layout, config, weights):
    groups = init_megatron(**layout)
    model = stock_models.build(name, groups, **config)
    load_whole([model], weights)
    losses = stock_models.backward(ddp := stock_models.wrap(model, groups), groups)
    return losses, local_pieces([ddp], gradient_of)


@pytest.fixture(scope="module")
def references():
    return {name: run_ranks(1, _reference, name, {})[0] for name in MODELS}


def _id(value: object) -> str:
    return "".join(f"{key}{size}" for key, size in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "world_size", "layout", "config"), LAYOUTS, ids=_id)
def test_layout(references, name, world_size, layout, config):
    """Measured upstream: loss within 5e-7 and gradient within 3.6e-7 of one process's."""
    weights, losses, gradient = references[name]
    results = run_ranks(world_size, _sharded, name, layout, config, weights)
    assert_gradients_close(assemble([pieces for _, pieces in results], replica_error=1e-6), gradient)
    got = [loss for losses_here, _ in results for loss in losses_here]  # the last stage's; equally many tokens each
    assert statistics.fmean(got) == pytest.approx(statistics.fmean(losses), rel=5e-7)


def test_runtime_undoes_every_patch():
    places = [(patch.owner, patch.name) for patch in cpu_patches()]

    def owned():
        return [vars(owner).get(name, "absent") for owner, name in places]

    before = owned()
    with cpu_runtime(), cpu_runtime():
        inside = owned()
        assert torch.zeros(2, device="cuda").cuda().device == torch.device("cpu")
        assert torch.cuda.current_stream() == torch.cuda.Stream()
    assert all(old is not new for old, new in zip(before, inside, strict=True))
    assert all(old is new for old, new in zip(before, owned(), strict=True))


def test_every_patch_has_its_reason_and_place():
    for patch in cpu_patches():
        assert re.search(r"\w.* \(.*\.py:\d+.*\)", patch.reason), str(patch)


def _enable_twice(rank, world_size):
    enable_cpu_runtime()
    first = torch.arange
    enable_cpu_runtime()
    with cpu_runtime():
        pass
    return torch.arange is first, torch.ones(1, device="cuda").device.type


def test_enabling_is_for_the_life_of_the_process_and_idempotent():
    assert run_ranks(1, _enable_twice, init=False) == [(True, "cpu")]
    assert not hasattr(torch.arange, "__wrapped__")


def test_refuses_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RefusedError, match="got a machine with CUDA, wanted one without"), cpu_runtime():
        pass
    with pytest.raises(RefusedError, match="use device=cuda"):
        enable_cpu_runtime()
    assert not hasattr(torch.arange, "__wrapped__")


def test_type_names_are_cuda_for_the_optimizers_only():
    ask = {"__name__": "megatron.core.optimizer.clip_grads", "tensor": torch.ones(1)}
    with cpu_runtime():
        exec("name = tensor.type()", ask)
        assert ask["name"] == "torch.cuda.FloatTensor"
        assert torch.ones(1).type() == "torch.FloatTensor"
        assert torch.ones(1).type(torch.float64).dtype is torch.float64


def test_patches_are_undone_when_the_block_raises():
    class Owner:
        present = 1

    patches = [Patch(Owner, "present", 2, "a reason"), Patch(Owner, "absent", 3, "a reason")]
    with pytest.raises(KeyError), applied(patches):
        assert (Owner.present, Owner.absent) == (2, 3)
        raise KeyError
    assert Owner.present == 1 and not hasattr(Owner, "absent")


def test_single_rank_leaves_nothing_behind():
    with single_rank() as groups:
        model = stock_models.build("glm", groups)
        assert groups.tp.size() == groups.expt_dp.size() == 1
        assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None], None)).all()
    assert not torch.distributed.is_initialized() and not gdn_common.HAVE_FLA
    assert run_ranks(2, lambda rank, world_size: init_megatron(tp=2).tp.size()) == [2, 2]


def _fake(rank, world_size):
    groups = init_megatron()
    with FakeTensorMode(allow_non_fake_inputs=True), fake_rng():
        model = stock_models.build("qwen", groups)
        out = model(torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None], None)
    return tuple(out.shape), sum(parameter.nbytes for parameter in model.parameters())


def test_builds_and_runs_under_fake_tensors(references):
    weights = references["qwen"][0]
    assert run_ranks(1, _fake) == [((1, 8, stock_models.VOCAB), 4 * sum(weight.numel() for weight in weights.values()))]


def test_what_the_stand_ins_do_not_compute_is_refused():
    with pytest.raises(RefusedError, match="TELinear on a CPU got parallel_mode='column', bias=False"):
        DuplicatedLinear(4, 4, config=None, init_method=None, bias=False, parallel_mode="column")
    x, weight = torch.ones(1, 3, 2), torch.ones(2, 4)
    with pytest.raises(RefusedError, match="causal_conv1d on a CPU got a state or packed sequences"):
        causal_conv1d(x, weight, output_final_state=True)
