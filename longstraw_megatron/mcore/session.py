"""From a `Config` and its rollouts to a trainer that is ready to run."""

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import nn

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.comm.pipeline import StageLink, make_channels
from longstraw_megatron.config import Config
from longstraw_megatron.mcore.checkpoint_folder import Checkpoint
from longstraw_megatron.mcore.group_work import CutOptions
from longstraw_megatron.mcore.learner import Learner, LearnerOptions, Logprobs, Progress
from longstraw_megatron.mcore.model import PRECISIONS, BuildOptions, build_model, wrap_ddp
from longstraw_megatron.mcore.optimizer import build_optimizer, build_scheduler
from longstraw_megatron.mcore.parallel import ParallelContext, pipeline_ranks
from longstraw_megatron.mcore.resume import resume_run, save_run
from longstraw_megatron.mcore.trainable import freeze_others
from longstraw_megatron.mcore.trainer import Trainer, TrainerOptions
from longstraw_megatron.mcore.weights import init_random_weights, load_hf_weights
from longstraw_megatron.ops.staging import HostStaging
from longstraw_megatron.state import OnDevice, Residence, StateOptions


def make_residence(location: str, device: torch.device) -> Residence:
    """Where prefix state rests: `device`, or `host` memory."""
    return HostStaging(device) if location == "host" else OnDevice()


def learner_options(config: Config, context: ParallelContext) -> LearnerOptions:
    grad_dtype = None if config.state.grad_dtype == "auto" else PRECISIONS[config.state.grad_dtype]
    return LearnerOptions(
        cut=CutOptions(
            segment_length=config.segment_length,
            branches_per_microbatch=config.branches_per_microbatch,
            response_block=config.response_block,
            style="zigzag",
            row_multiple=context.row_multiple,
        ),
        state=StateOptions(
            exact=config.gradient == "exact",
            page_length=config.state.page_length,
            grad_dtype=grad_dtype,
            grad_rounding=config.state.grad_rounding,
            residence=make_residence(config.state.location, context.device),
        ),
        objective=config.objective,
        logprob_block=config.logprob_block,
        max_live_prefixes=config.schedule.max_live_prefixes,
        stage_inputs=config.state.stage_inputs,
        reuse_steps=config.state.reuse_steps,
        reuse_check_every=config.state.reuse_check_every,
    )


def make_link(context: ParallelContext) -> StageLink | None:
    """The stages' transfers; over NCCL every direction between two ranks has a communicator of its own."""
    if context.groups.pp.size() == 1:
        return None
    channels = make_channels(pipeline_ranks()) if context.device.type == "cuda" else None
    return StageLink(context.groups.pp, channels=channels, device=context.device)


def fill_weights(chunks: list[nn.Module], config: Config, context: ParallelContext, hf_path: str | None) -> None:
    """From a checkpoint folder, or at random by name: alike in every layout."""
    if hf_path is not None:
        load_hf_weights(chunks, hf_path, groups=context.groups, hf_config=config.model.hf_config)
    else:
        init_random_weights(chunks, config.model.hf_config, seed=config.seed, groups=context.groups)


def score_reference(
    config: Config,
    groups: list[PromptGroup],
    context: ParallelContext,
    link: StageLink | None,
    progress: Progress | None = None,
) -> Logprobs:
    """Logprobs under the reference policy, where the objective needs them and the rollouts lack them.

    The reference is built, read once over all groups, and freed before the trained model is made.
    """
    lacking = [any(branch.ref_logprobs is None for branch in group.branches) for group in groups]
    if "ref_logprobs" not in config.objective.needs or not any(lacking):
        return {}
    options = BuildOptions(precision=config.precision)
    chunks = build_model(config.model.hf_config, options, context, freeze=True)
    fill_weights(chunks, config, context, config.reference.hf_path)
    indices = [index for index, lacks in enumerate(lacking) if lacks]
    learner = Learner(chunks, context, learner_options(config, context), link=link, progress=progress)
    scored = learner.score([groups[index] for index in indices])
    del learner, chunks
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        (indices[g], b): values
        for (g, b), values in scored.items()
        if groups[indices[g]].branches[b].ref_logprobs is None
    }


def build_trained(
    config: Config, context: ParallelContext, *, fill: bool = True
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """The trained model in DDP, one chunk per virtual stage, and its optimizer; weights unset without `fill`."""
    build = BuildOptions(precision=config.precision, recompute=config.recompute)
    chunks = build_model(config.model.hf_config, build, context)
    if config.trainable != "all":
        freeze_others(chunks, config.trainable, config.model.hf_config, context.groups)
    # Megatron's host optimizer shares nothing with the device only as a distributed one
    distributed = context.groups.dp_cp.size() > 1 or config.optimizer.optimizer_cpu_offload
    chunks = wrap_ddp(
        chunks,
        context,
        use_distributed_optimizer=distributed,
        grad_reduce_in_fp32=config.optimizer.grad_reduce_in_fp32,
        keep_weights=False,
    )
    if fill:
        fill_weights(chunks, config, context, config.model.hf_path)
    optimizer = build_optimizer(
        config.optimizer, chunks, context, precision=config.precision, use_distributed_optimizer=distributed
    )
    return chunks, optimizer


def build_trainer(
    config: Config,
    groups: list[PromptGroup],
    context: ParallelContext,
    *,
    progress: Progress | None = None,
    resume_from: Checkpoint | None = None,
    wandb_id: str | None = None,
) -> Trainer:
    """Reference scores, model, DDP, optimizer and schedule of a run, where `resume_from` left it."""
    link = make_link(context)
    ref_logprobs = score_reference(config, groups, context, link, progress)
    chunks, optimizer = build_trained(config, context)
    trainer = Trainer(
        learner=Learner(chunks, context, learner_options(config, context), link=link, progress=progress),
        optimizer=optimizer,
        scheduler=build_scheduler(config.optimizer, optimizer, max_steps=config.trainer.max_steps),
        groups=groups,
        options=TrainerOptions(
            max_steps=config.trainer.max_steps,
            groups_per_step=config.groups_per_step,
            export_grads=config.trainer.export_grads,
            export_logprobs=config.trainer.export_logprobs,
            export_hf=config.trainer.export_hf,
            save_every=config.trainer.save_every,
        ),
        hf_config=config.model.hf_config,
        hf_path=config.model.hf_path,
        ref_logprobs=ref_logprobs,
    )
    if config.trainer.save_dir is not None:
        trainer.save = lambda step: save_run(trainer, step, config, wandb_id)
    if resume_from is not None:
        resume_run(trainer, resume_from)
    return trainer
