"""Resume of Megatron's distributed optimizer over torch's AdamW, mended.

Without Transformer Engine and Apex the inner optimizer is `torch.optim.AdamW`, whose state has a tensor `step` for
each parameter. Megatron-Core 0.19.2 then resumes wrongly, in four places: `resume_patches` mends them in the running
process, `patches/0003-*.patch` in Megatron's own source. Both may be there at once.
"""

import functools
from collections.abc import Callable

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

from longstraw_megatron.mcore.patching import Patch


def _state_dict(state_dict: Callable) -> Callable:
    @functools.wraps(state_dict)
    def wrapper(self):
        if self.optimizer.state:
            return state_dict(self)
        self.optimizer.state["no parameter yet"] = {"step": torch.tensor(0.0)}
        try:
            return state_dict(self)
        finally:
            del self.optimizer.state["no parameter yet"]

    return wrapper


def _load_state_dict(load_state_dict: Callable) -> Callable:
    @functools.wraps(load_state_dict)
    def wrapper(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return wrapper


def _set_main_param_and_optimizer_states(set_states: Callable) -> Callable:
    @functools.wraps(set_states)
    def wrapper(self, model_param, tensors):
        with torch.no_grad():
            set_states(self, model_param, {"step": None, **tensors})

    return wrapper


def resume_patches() -> list[Patch]:
    """The patches; none where the inner optimizer is Transformer Engine's or Apex's, which resumes rightly."""
    if HAVE_APEX_OR_TE:
        return []
    file, cls = "optimizer/distrib_optimizer.py", DistributedOptimizer
    table = (
        ("state_dict", _state_dict, f"asserts that there is a step, before the first one too ({file}:839)"),
        ("load_state_dict", _load_state_dict, f"gives all parameters one step tensor, raised for each ({file}:1032)"),
        (
            "_set_main_param_and_optimizer_states",
            _set_main_param_and_optimizer_states,
            f"wants a step of each parameter in the checkpoint ({file}:1223), "
            f"and copies into float32 leaf views under grad mode ({file}:1225)",
        ),
    )
    return [Patch(cls, name, wrap(vars(cls)[name]), reason) for name, wrap, reason in table]
