"""State in host memory: the gradient is that of state on the device, bit for bit.

On a CPU the same copies are made at the same moments as on a GPU, values in before they are read and sums out behind
them, so that one that is missing or comes too late shows.
"""

from collections import Counter

import pytest
import torch
from harness import Layout, gradients_of, make_groups
from oracle import glm_config, make_model, qwen_config

from longstraw_megatron.ops.staging import HostStaging

SHORT = [(60, [9, 1, 12]), (1, [5])]
LAYOUTS = {
    "one process": Layout(segment_length=16, page_length=12),
    "cp2": Layout(cp=2, segment_length=16, page_length=12),
    "tp2 sp": Layout(tp=2, segment_length=16, page_length=12),
    "pp2": Layout(pp=2, segment_length=16, page_length=12),
    "blocks": Layout(segment_length=16, page_length=12, response_block=5, recompute="full"),
}


@pytest.fixture(scope="module", params=["qwen", "glm"])
def model(request):
    is_qwen = request.param == "qwen"
    return make_model(qwen_config(num_hidden_layers=4) if is_qwen else glm_config(index_n_heads=4, num_hidden_layers=7))


@pytest.mark.parametrize("detached", [False, True], ids=["exact", "detached"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_the_same_bits(model, name, detached):
    layout, groups = LAYOUTS[name], make_groups(*SHORT)
    on_device = gradients_of(layout, model, groups, detached=detached)
    layout = Layout(**(vars(layout) | {"residence": HostStaging(torch.device("cpu"))}))
    on_host = gradients_of(layout, model, groups, detached=detached)
    for ours, theirs in zip(on_host, on_device, strict=True):
        assert ours.keys() == theirs.keys() and ours
        assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]


class _Counted(HostStaging):
    """Asserts, on one process, that state is staged in both directions."""

    counts: Counter = Counter()

    def fetch(self, *tensors):
        self.counts["fetched"] += len(tensors)
        return super().fetch(*tensors)

    def store(self, target, source):
        self.counts["stored"] += 1
        super().store(target, source)

    def gather(self, tensor, rows):
        self.counts["gathered"] += 1
        return super().gather(tensor, rows)

    def scatter(self, tensor, rows, source):
        self.counts["scattered"] += 1
        super().scatter(tensor, rows, source)


def _count(rank, world_size, hf, weights, groups, layout):
    from harness import build_learner, fill_from_hf, prompt_groups

    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    learner.compute_gradients(prompt_groups(groups))
    return dict(layout.residence.counts)


def test_state_is_staged_and_selected_rows_are_gathered(model):
    from longstraw_megatron.testing import run_ranks

    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    layout = Layout(segment_length=16, page_length=12, residence=_Counted(torch.device("cpu")))
    # few queries behind a long prompt select few of its rows
    (counts,) = run_ranks(1, _count, hf, dict(model.state_dict()), make_groups((120, [1, 1])), layout, timeout=400)
    assert counts["fetched"] > 100 and counts["stored"] > 100
    is_glm = model.config.model_type.startswith("glm")
    assert (counts.get("gathered", 0) > 0, counts.get("scattered", 0) > 0) == (is_glm, is_glm)
