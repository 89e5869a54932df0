"""metrics.jsonl, W&B's offline file, progress and tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longstraw_megatron.config import WandbConfig
from longstraw_megatron.logging import MetricsWriter, Progress, format_bytes, format_table
from longstraw_megatron.schedule.actions import Action, Op


def settings(mode="disabled", **changes) -> WandbConfig:
    values = {"project": "test", "entity": None, "name": None, "group": None, "job_type": None, "id": None, "tags": ()}
    return WandbConfig(mode=mode, **(values | changes))


def lines(writer) -> list[dict]:
    return [json.loads(line) for line in writer.path.read_text().splitlines()]


def test_one_json_object_for_each_step_and_none_on_other_ranks(tmp_path):
    with MetricsWriter(tmp_path / "a", settings()) as writer:
        writer.log(1, {"train/loss": 0.5})
        assert lines(writer) == [{"step": 1, "train/loss": 0.5}], "on disk when log returns"
        writer.log(2, {"train/loss": float("nan"), "x": float("-inf")})
    assert lines(writer)[1] == {"step": 2, "train/loss": "NaN", "x": "-Infinity"}
    with MetricsWriter(tmp_path / "b", settings(), is_writer=False) as other:
        other.log(1, {"train/loss": 0.5})
    assert not (tmp_path / "b").exists()


def test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path):
    with MetricsWriter(tmp_path, settings()) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"v": step})
    with writer.path.open("a") as file:
        file.write('{"step": 4, "v"')  # a crash in the middle of a line
    with MetricsWriter(tmp_path, settings(), resume_step=2) as writer:
        writer.log(3, {"v": 30})
    assert [line["v"] for line in lines(writer)] == [1, 2, 30]
    with MetricsWriter(tmp_path, settings()) as writer:
        writer.log(1, {"v": 9})
    assert len(lines(writer)) == 1 and (tmp_path / "metrics.1.jsonl").exists(), "a new run moves the old file away"


def test_the_offline_file_of_wandb_has_the_metrics(tmp_path):
    for verb in ("write", "read"):
        command = [sys.executable, Path(__file__).with_name("wandb_offline.py"), verb, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    history = json.loads(done.stdout.splitlines()[-1])
    assert [items["train/loss"] for items in history] == [0.125, 0.25]


def test_a_failing_wandb_does_not_stop_the_run(tmp_path, capsys):
    class Broken:
        id = "x"

        def log(self, *args, **kwargs):
            raise RuntimeError("no disk")

    with MetricsWriter(tmp_path, settings()) as writer:
        writer._run = Broken()
        writer.log(1, {"v": 1})
        writer.log(2, {"v": 2})
    assert [line["v"] for line in lines(writer)] == [1, 2]
    assert capsys.readouterr().err.count("no disk") == 1


def test_progress_counts_actions(capsys):
    progress = Progress(enabled=True)
    progress.begin("step 1", {Op.PREFILL: 2, Op.FORWARD: 1})
    for action in (Action(Op.PREFILL, 0, 0, 0), Action(Op.PREFILL, 0, 1, 0), Action(Op.FORWARD, 0, 0, 0)):
        progress(action)
    progress.end()
    err = capsys.readouterr().err
    assert "step 1 prompt segments" in err and "2/2" in err and "branches" in err
    assert "\x1b" not in err  # a log file's reader moves no cursor


def test_tables():
    assert format_table([("a", 1), ("bb", None)], ("n", "v")).splitlines() == ["n   v", "--  -", "a   1", "bb  -"]
    assert format_bytes(1536) == "1.5 KiB"
    with pytest.raises(ValueError, match="rows of equal length"):
        format_table([(1, 2), (1,)])
