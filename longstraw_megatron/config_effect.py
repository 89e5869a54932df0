"""Keys that a run sets and that change nothing in it: said, not refused, since runs share files of keys."""

from longstraw_megatron.config import Config


def keys_without_effect(config: Config) -> list[str]:
    """A sentence for each key away from its default that this run can't use; `device` and `precision` are resolved."""
    state, found = config.state, []

    def note(key: str, value: object, reason: str) -> None:
        found.append(f"{key}={value} has no effect: {reason}.")

    if not config.optimizer.grad_reduce_in_fp32 and config.precision != "bf16":
        note("optimizer.grad_reduce_in_fp32", "false", f"precision={config.precision} takes equal ones")
    if state.stage_inputs == "host" and config.parallel.pp == 1:
        note("state.stage_inputs", "host", "with parallel.pp=1 no stage gets its inputs from another")
    if config.gradient == "detached" and config.response_block is None:
        # a prompt that is not walked back and whole responses have no sums of state gradients
        if state.grad_dtype != "auto":
            note("state.grad_dtype", state.grad_dtype, "gradient=detached with whole responses has none")
        if state.grad_rounding != "nearest":
            note("state.grad_rounding", state.grad_rounding, "nothing is rounded")
    if config.reference.hf_path is not None and "ref_logprobs" not in config.objective.needs:
        note("reference.hf_path", config.reference.hf_path, f"objective.{config.objective.name} takes no reference")
    return found
