"""Numbers of each step: one JSON object a line in metrics.jsonl, and the same names in W&B.

The file is the record; W&B is a copy. Once training runs, W&B can neither stop it nor hold it up: a failure is told
once and W&B is left. Before that, a W&B that was asked for online and can't be reached is a refusal.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longstraw_megatron.checks import make_folder
from longstraw_megatron.config import WandbConfig
from longstraw_megatron.errors import RefusedError

INIT_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60
NON_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def _jsonable(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return NON_FINITE.get(value, "NaN")
    return value


def _first_free(path: Path) -> Path:
    """path.1.suffix, or the next number that no file has."""
    number = 1
    while (free := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return free


def _keep_steps(path: Path, last_step: int) -> None:
    """Drop the lines after `last_step`, and a line that a crash cut short."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(kept), encoding="utf-8")


class MetricsWriter:
    """Writes on one rank (`is_writer`), and does nothing on the others.

    `resume_step` is the last step of the checkpoint that a run goes on from: later lines of metrics.jsonl are dropped,
    and W&B's run id is that of before. Without it the metrics.jsonl of an earlier run is moved to metrics.N.jsonl.
    """

    def __init__(
        self,
        run_dir: str | Path,
        wandb: WandbConfig,
        *,
        is_writer: bool = True,
        run_config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "metrics.jsonl"
        self.wandb_dir: Path | None = None  # W&B's files of this run
        self._file = self._run = None
        if not is_writer:
            return
        make_folder("run_dir", str(run_dir))
        if wandb.mode != "disabled":
            self._run = self._start_wandb(wandb, run_config, is_resumed=resume_step is not None)
            self.wandb_dir = Path(self._run.dir).parent
        try:
            if self.path.exists():
                if resume_step is None:
                    self.path.rename(_first_free(self.path))
                else:
                    _keep_steps(self.path, resume_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            self.close(exit_code=1)
            raise RefusedError(f"{self.path} can't be written: {error.strerror}; name another run_dir.") from error

    @property
    def wandb_id(self) -> str | None:
        """W&B's id of this run, on the rank that writes."""
        return None if self._run is None else self._run.id

    def _start_wandb(self, config: WandbConfig, run_config: Mapping[str, Any] | None, *, is_resumed: bool) -> Any:
        import wandb

        id_file = self.run_dir / "wandb_id"
        run_id = config.id
        if run_id is None and is_resumed and id_file.exists():
            run_id = id_file.read_text(encoding="utf-8").strip()
        try:
            run = wandb.init(
                mode=config.mode,
                project=config.project,
                entity=config.entity,
                name=config.name,
                group=config.group,
                job_type=config.job_type,
                id=run_id,
                tags=list(config.tags) or None,
                dir=str(self.run_dir),
                config=dict(run_config or {}),
                # Offline there is nothing to ask; `wandb sync` merges runs of one id.
                resume="allow" if run_id is not None and config.mode == "online" else None,
                settings=wandb.Settings(
                    silent=True,
                    console="off",  # bars and tables stay what they are
                    init_timeout=INIT_TIMEOUT_S,
                    login_timeout=INIT_TIMEOUT_S,
                    finish_timeout=FINISH_TIMEOUT_S,
                    force=config.mode == "online",  # no question at a prompt, no silent fall back to offline
                ),
            )
        except Exception as error:
            reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
            raise RefusedError(
                f"wandb.mode={config.mode} could not start a run: {reason}; log in, or set wandb.mode=offline."
            ) from error
        id_file.write_text(f"{run.id}\n", encoding="utf-8")
        return run

    def _leave_wandb(self, error: Exception) -> None:
        print(f"W&B failed ({error}); the run goes on, its metrics are in {self.path}.", file=sys.stderr)
        self._run = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line for optimizer step `step` (from 1 up), on disk when this returns."""
        if self._file is None:
            return
        record = {"step": step, **metrics}
        self._file.write(json.dumps({name: _jsonable(value) for name, value in record.items()}, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._run is not None:
            try:
                self._run.log(record, step=step)
            except Exception as error:
                self._leave_wandb(error)

    def close(self, exit_code: int = 0) -> None:
        """Finish W&B's run, within a bound, as succeeded or (`exit_code`) failed."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception as error:
                self._leave_wandb(error)
            self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(0 if kind is None else 1)
