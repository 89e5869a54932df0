"""The launch scripts say what they mean: every key composes, and the processes fit the layout."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from longstraw_megatron.compose import load_config
from longstraw_megatron.config import check_world_size

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# script -> model, more words on its command line, nodes, data-parallel size, the layout (tp, cp, pp, ep)
SCRIPTS = {
    "qwen_8gpu": ("qwen3_6_27b", [], 1, 1, (4, 1, 2, 1)),
    "qwen_4x8gpu": ("qwen3_6_27b", ["parallel=qwen_32gpu_tp4_cp2_pp2"], 4, 2, (4, 2, 2, 1)),
    "glm_4x8gpu": ("glm_5_2", [], 4, 1, (1, 32, 1, 32)),
}
BIG_GLM = ["parallel=glm_32gpu_pp4_cp8_ep8", "parallel.ep=64"]


def _launch(script, tmp_path, *words, **environment):
    """What the script passes to torchrun, as words."""
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    path = f"{fake.parent}:{os.environ['PATH']}"
    command = ["bash", str(EXAMPLES / f"{script}.sh"), *words]
    done = subprocess.run(command, env={"PATH": path} | environment, capture_output=True, text=True)
    return done, done.stdout.split("\0")[:-1]


def _environment(model, tmp_path):
    hf_config = load_config([f"model={model}"]).model.hf_config
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    return {"MODEL": str(tmp_path), "ROLLOUTS": "a b.jsonl", "HEAD": "node0", "NODE_RANK": "3", "RUN": "runs/x"}


def _split(words):
    """(torchrun's options, config)"""
    module = words.index("-m")
    assert words[module + 1] == "longstraw_megatron.train"
    return words[:module], load_config(words[module + 2 :])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_composes(script, tmp_path):
    model, words, nodes, dp, layout = SCRIPTS[script]
    done, launched = _launch(script, tmp_path, *words, **_environment(model, tmp_path))
    assert done.returncode == 0, done.stderr
    options, config = _split(launched)
    if nodes == 1:
        assert options == ["--standalone", "--nproc-per-node", "8"]
    else:
        assert dict(zip(options[::2], options[1::2], strict=True)) == {
            "--nnodes": str(nodes),
            "--nproc-per-node": "8",
            "--node-rank": "3",
            "--master-addr": "node0",
            "--master-port": "29500",
        }
    assert check_world_size(config, 8 * nodes) == dp
    parallel = config.parallel
    assert (parallel.tp, parallel.cp, parallel.pp, parallel.ep) == layout
    assert (config.gradient, config.rollouts.path, config.model.hf_path) == ("exact", "a b.jsonl", str(tmp_path))
    assert config.trainer.resume == "auto"


def test_more_nodes_as_the_comment_says(tmp_path):
    environment = _environment("glm_5_2", tmp_path) | {"NNODES": "32"}
    done, launched = _launch("glm_4x8gpu", tmp_path, *BIG_GLM, **environment)
    assert " ".join(BIG_GLM) in (EXAMPLES / "glm_4x8gpu.sh").read_text()
    options, config = _split(launched)
    assert options[:2] == ["--nnodes", "32"] and check_world_size(config, 256) == 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_missing_is_named(script, tmp_path):
    done, launched = _launch(script, tmp_path, HEAD="node0", NODE_RANK="0")
    assert done.returncode != 0 and "MODEL is the checkpoint folder" in done.stderr and not launched


def test_every_script_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.sh")} == set(SCRIPTS)
