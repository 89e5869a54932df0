"""The training door: `torchrun --nproc-per-node N -m longstraw_megatron.train KEY=VALUE ...`.

Everything that can be refused is refused before a weight is made: exit code 2, one sentence on one rank's stderr.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

import torch

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.checks import check_experts, check_place
from longstraw_megatron.comm.failure import PeerError
from longstraw_megatron.compose import load_config, run_hardware
from longstraw_megatron.config import Config, check_world_size, resolve_auto
from longstraw_megatron.config_effect import keys_without_effect, rounding_advice
from longstraw_megatron.errors import NonFiniteError, RefusedError
from longstraw_megatron.logging import MetricsWriter, Progress, format_bytes, format_table
from longstraw_megatron.rollouts import length_warnings, read_rollouts

logger = logging.getLogger("longstraw_megatron")

REFUSED, FAILED, INTERRUPTED = 2, 1, 130


def read_groups(config: Config) -> list[PromptGroup]:
    """The rollouts of a run, checked against its model and objective."""
    if config.rollouts.path is None:
        raise RefusedError("rollouts.path is not set; name a file of prompt groups, rollouts.path=FILE.")
    hf = config.model.hf_config
    groups = read_rollouts(
        config.rollouts.path,
        format=config.rollouts.format,
        tokenizer=config.rollouts.tokenizer,
        vocab_size=hf["vocab_size"],
    )
    for name in config.objective.needs:
        if name == "ref_logprobs" and config.reference.hf_path is not None:
            continue
        for group in groups:
            for i, branch in enumerate(group.branches):
                if getattr(branch, name) is None:
                    remedy = " or name a reference.hf_path" if name == "ref_logprobs" else ""
                    raise RefusedError(
                        f"objective.{config.objective.name} needs {name}, but branch {i} of group {group.group_id} has "
                        f"none; add them to the rollouts{remedy}."
                    )
    return groups


def check(config: Config, world_size: int) -> list[PromptGroup]:
    """All that is judged before torch.distributed and Megatron start; returns the rollouts."""
    from longstraw_megatron.mcore.architectures import architecture_of, pipeline_layout, text_config
    from longstraw_megatron.mcore.trainable import trainable_names
    from longstraw_megatron.mcore.trainer import steps_of
    from longstraw_megatron.mcore.weights import check_hf_folder, refuse_occupied

    check_world_size(config, world_size)
    architecture_of(config.model.hf_config).check(text_config(config.model.hf_config))
    parallel = config.parallel
    pipeline_layout(text_config(config.model.hf_config), pp=parallel.pp, vpp=parallel.vpp, stages=parallel.stages)
    check_experts(config)
    if config.trainable != "all":
        trainable_names(config.trainable, config.model.hf_config)
    for folder in {config.model.hf_path, config.reference.hf_path} - {None}:
        check_hf_folder(folder, config.model.hf_config)
    if config.trainer.export_hf is not None:
        refuse_occupied(config.trainer.export_hf)
    check_outputs(config)
    groups = read_groups(config)
    steps_of(len(groups), config.groups_per_step)
    check_routed_experts(config, groups)
    return groups


def check_outputs(config: Config) -> None:
    """What this rank writes has a place, before it computes for hours."""
    trainer, is_file = config.trainer, {"trainer.export_grads", "trainer.export_logprobs"}
    places = {"trainer.save_dir": trainer.save_dir, "trainer.export_hf": trainer.export_hf}
    if os.environ.get("RANK", "0") == "0":
        places |= {"run_dir": config.run_dir}
        places |= {"trainer.export_grads": trainer.export_grads, "trainer.export_logprobs": trainer.export_logprobs}
    for key, name in places.items():
        if name is not None:
            check_place(key, name, is_file=key in is_file)


def past_exports(config: Config, steps_done: int) -> list[str]:
    """A sentence for each export of the first step that a resumed run no longer makes."""
    keys = [key for key in ("export_grads", "export_logprobs") if getattr(config.trainer, key) is not None]
    return [
        f"trainer.{key} is of the first step, but the run goes on after step {steps_done}: nothing is written."
        for key in keys
        if steps_done
    ]


def check_memory(config: Config, groups: list[PromptGroup], world_size: int, memory_bytes: float) -> None:
    """Refuse a run whose plan exceeds `memory_bytes`, the memory of each rank's device (`plan.enforce`)."""
    from longstraw_megatron.plan.enforce import refuse_too_big
    from longstraw_megatron.plan.workload import Workload

    if config.plan.enforce:
        config = dataclasses.replace(config, hardware=run_hardware(config))
        refuse_too_big(config, Workload.of_groups(groups), num_gpus=world_size, memory_bytes=memory_bytes)


def check_routed_experts(config: Config, groups: list[PromptGroup]) -> None:
    """Router replay needs the experts of every MoE layer for every branch, or for none."""
    given = [(group, i, branch) for group in groups for i, branch in enumerate(group.branches)]
    having = [branch for _, _, branch in given if branch.routed_experts is not None]
    if not having:
        return
    hf = config.model.hf_config
    num_experts, top_k = hf.get("n_routed_experts", 0), hf.get("num_experts_per_tok", 0)
    num_layers = hf["num_hidden_layers"] - hf.get("first_k_dense_replace", 0) if num_experts else 0
    for group, i, branch in given:
        where = f"routed_experts of branch {i} of group {group.group_id}"
        if not num_experts:
            raise RefusedError(f"{where} got values, but the model has no experts; drop the field.")
        if branch.routed_experts is None:
            raise RefusedError(f"{where} is absent, but other branches have them; give all branches theirs, or none.")
        shape, wanted = branch.routed_experts.shape[1:], (num_layers, top_k)
        if shape != wanted:
            raise RefusedError(
                f"{where} got {list(shape)} [MoE layers, top-k] per token, wanted {list(wanted)}; record them with "
                "this model."
            )
        if branch.routed_experts.max(initial=0) >= num_experts:
            raise RefusedError(
                f"{where} names expert {branch.routed_experts.max()}, but the model has {num_experts}, counted from 0; "
                "record them with this model."
            )


def print_summary(writer: MetricsWriter, history: list[dict[str, float]]) -> None:
    """What the run did: a line per step, then time and peak memory by phase of the last step."""
    columns = ("step", "loss", "grad norm", "ratio", "ratio min", "ratio max", "logprob +", "logprob -", "seconds")
    keys = ("loss", "grad_norm", "ratio_mean", "ratio_min", "ratio_max", "logprobs_preferred", "logprobs_rejected")
    rows = [
        (step, *(metrics.get(f"train/{key}") for key in keys), metrics["perf/step_seconds"])
        for step, metrics in enumerate(history, start=1)
    ]
    print("\n" + format_table(rows, columns))
    last = history[-1]
    phases = [name.removeprefix("perf/").removesuffix("_peak_gb") for name in last if name.endswith("_peak_gb")]
    rows = [
        (
            phase.replace("_", " "),
            int(last[tokens]) if (tokens := f"perf/{phase}_tokens") in last else None,
            last[f"perf/{phase}_seconds"],
            format_bytes(last[f"perf/{phase}_peak_gb"] * 1e9),
        )
        for phase in phases
    ]
    print("\n" + format_table(rows, ("phase of the last step", "tokens", "seconds", "peak memory")))
    print(f"\nmetrics  {writer.path}")
    if writer.wandb_dir is not None:
        print(f"W&B      {writer.wandb_dir}")


def run(config: Config, groups: list[PromptGroup]) -> None:
    """Build and train. Every rank runs this."""
    from longstraw_megatron.mcore.parallel import init_parallel, pick_device
    from longstraw_megatron.mcore.resume import find_resume
    from longstraw_megatron.mcore.session import build_trainer
    from longstraw_megatron.mcore.trainer import steps_of

    device = pick_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, (os.cpu_count() or 1) // 2))
    context = init_parallel(config.parallel, device=device, seed=config.seed, timeout_s=config.dist.timeout_s)
    progress = Progress(enabled=context.is_first)
    resume_from = find_resume(config, groups)
    warnings = length_warnings(groups, config.model.hf_config.get("max_position_embeddings"))
    warnings += keys_without_effect(config, max(max(group.response_lengths) for group in groups))
    steps = [[groups[i] for i in step] for step in steps_of(len(groups), config.groups_per_step)]
    warnings += rounding_advice(config, steps, context.groups.dp.size())
    warnings += past_exports(config, 0 if resume_from is None else resume_from.step)
    for warning in warnings if context.is_first else ():
        logger.warning(warning)
    wandb_id = config.wandb.id or (resume_from.extra["wandb_id"] if resume_from is not None else None)
    writer = MetricsWriter(
        config.run_dir,
        dataclasses.replace(config.wandb, id=wandb_id),
        is_writer=context.is_first,
        run_config=dataclasses.asdict(config),
        resume_step=None if resume_from is None else resume_from.step,
    )
    history: list[dict[str, float]] = []
    with writer:
        trainer = build_trainer(
            config, groups, context, progress=progress, resume_from=resume_from, wandb_id=writer.wandb_id
        )

        def on_step(step: int, metrics: dict[str, float]) -> None:
            progress.end()
            history.append(metrics)
            writer.log(step, metrics)
            if context.is_first:
                print(
                    f"step {step}/{config.trainer.max_steps}  loss {metrics['train/loss']:.6f}  grad norm "
                    f"{metrics['train/grad_norm']:.4f}  {metrics['perf/step_seconds']:.1f} s  "
                    f"{metrics['perf/tokens_per_second']:.0f} tokens/s",
                    flush=True,
                )

        trainer.run(on_step)
        progress.end()
        if context.is_first and history:
            print_summary(writer, history)


def _is_first_to_refuse() -> bool:
    """Whether this rank says why: one, whichever meets it first; before ranks know each other, one of each machine."""
    if not torch.distributed.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.add("longstraw_megatron/refused", 1) == 1
    except RuntimeError:  # the rank that held the store has left
        return True


def _device_memory(config: Config, world_size: int) -> int:
    from longstraw_megatron.mcore.monitor import device_memory
    from longstraw_megatron.mcore.parallel import pick_device

    return device_memory(pick_device(config.device), int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 refused, 1 failed, 130 interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("longstraw_megatron").setLevel(logging.INFO)
    try:
        config = load_config(sys.argv[1:] if argv is None else list(argv))
        config = resolve_auto(config, cuda_available=torch.cuda.is_available())
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        groups = check(config, world_size)
        check_memory(config, groups, world_size, _device_memory(config, world_size))
        run(config, groups)
    except RefusedError as error:
        if _is_first_to_refuse():
            print(f"longstraw_megatron: {error}", file=sys.stderr, flush=True)
        return REFUSED
    except (NonFiniteError, PeerError) as error:
        print(f"longstraw_megatron: {error}", file=sys.stderr, flush=True)
        return FAILED
    except KeyboardInterrupt:
        print("longstraw_megatron: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
