"""Saving a run and going on with it: what `checkpoint.py` stores besides model and optimizer."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.config import Config
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.checkpoint import load_checkpoint, save_checkpoint
from longstraw_megatron.mcore.checkpoint_folder import Checkpoint, find_checkpoint, latest_checkpoint
from longstraw_megatron.mcore.trainer import Trainer


def fingerprint(groups: Sequence[PromptGroup]) -> str:
    """A digest of the rollouts that a run trains on: everything in them that the gradient depends on."""
    digest = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape} ".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(f"{value!r} ".encode())

    for group in groups:
        for value in (group.group_id, group.prompt_tokens, group.group_size):
            add(value)
        for branch in group.branches:
            for field in dataclasses.fields(branch):
                add(getattr(branch, field.name))
    return digest.hexdigest()


def find_resume(config: Config, groups: Sequence[PromptGroup]) -> Checkpoint | None:
    """The checkpoint that the run goes on from; None to start anew.

    `trainer.resume=auto` takes the newest complete one in `trainer.save_dir`, if there is any; a path must hold one.

    Raises:
        RefusedError: no complete checkpoint at the path, other rollouts or groups_per_step, or nothing left to do.
    """
    trainer = config.trainer
    if trainer.resume is None:
        return None
    if trainer.resume == "auto":
        path = latest_checkpoint(trainer.save_dir)
        if path is None:
            return None
    else:
        path = Path(trainer.resume)
    checkpoint = find_checkpoint(path)
    if checkpoint.extra.get("rollouts") != fingerprint(groups):
        raise RefusedError(
            f"trainer.resume={trainer.resume} was saved by a run over other rollouts than {config.rollouts.path}; "
            "name the file that it trained on, or start anew with trainer.resume=null."
        )
    per_step = checkpoint.extra.get("groups_per_step", config.groups_per_step)
    if per_step != config.groups_per_step:
        raise RefusedError(
            f"trainer.resume={trainer.resume} was saved with groups_per_step={per_step}, got groups_per_step="
            f"{config.groups_per_step}, under which its next step would take groups out of turn; keep the number."
        )
    if checkpoint.step >= trainer.max_steps:
        raise RefusedError(
            f"trainer.resume={trainer.resume} is at step {checkpoint.step}, which trainer.max_steps="
            f"{trainer.max_steps} has reached; raise trainer.max_steps to go on."
        )
    return checkpoint


def save_run(trainer: Trainer, step: int, config: Config, wandb_id: str | None) -> None:
    """A checkpoint after optimizer step `step` in `trainer.save_dir`. Every rank calls this."""
    extra = {
        "rollouts": fingerprint(trainer.groups),
        "next_step": step,
        "groups_per_step": config.groups_per_step,
        "old_logprobs": [[g, b, values.tolist()] for (g, b), values in sorted(trainer.old_logprobs.items())],
        "wandb_id": wandb_id,
    }
    save_checkpoint(
        config.trainer.save_dir,
        step,
        trainer.learner.chunks,
        trainer.optimizer,
        trainer.scheduler,
        extra,
        groups=trainer.learner.context.groups,
        keep=config.trainer.keep,
    )


def resume_run(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a built trainer where the checkpoint was saved."""
    load_checkpoint(
        checkpoint.path,
        trainer.learner.chunks,
        trainer.optimizer,
        trainer.scheduler,
        groups=trainer.learner.context.groups,
    )
    trainer.first_step = checkpoint.extra["next_step"]
    trainer.old_logprobs = {(g, b): np.asarray(values) for g, b, values in checkpoint.extra["old_logprobs"]}
