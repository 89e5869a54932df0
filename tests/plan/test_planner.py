"""The door: tables, JSON, pictures, and what it refuses."""

import json
import logging

import pytest
from PIL import Image

from longstraw_megatron.compose import config_dir, load_config
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.plan.dry_run import DryRunResult, Phase
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import plan_memory
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.planner import main, resolve_hardware
from longstraw_megatron.planner.tables import compare_dry_run

SMALL = ["prompt_length=4096", "segment_length=1024", "response_length=64", "group_size=4"]


def test_table_pictures_and_schedule(tmp_path, capsys):
    words = [*SMALL, "parallel.pp=2", "draw=true", f"run_dir={tmp_path}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "tiny_qwen_hybrid, PP2 on 2 x cpu" in said and "state gradients" in said and "makespan" in said
    assert said.count("rank 1 |") == 1
    kinds = "P prefill, F branch forward, B branch backward, W prompt backward"
    assert f"a rank of the pipeline a line; {kinds}; in seconds" in said
    for name in ("plan_memory.png", "plan_schedule.png"):
        assert len(set(Image.open(tmp_path / name).convert("RGB").get_flattened_data())) > 20


def test_json_sums_up(tmp_path, capsys):
    words = ["model=tiny_glm_dsa", *SMALL, "parallel.ep=2", "parallel.cp=2", "hardware=h100"]
    assert main([*words, "format=json", f"run_dir={tmp_path}"]) == 0
    tree = json.loads(capsys.readouterr().out)
    (stage,) = tree["stages"]
    assert tree["fits"] and tree["num_gpus"] == 2 and stage["ranks"] == [0, 1]
    assert sum(stage["bytes"].values()) == stage["total_bytes"] == max(stage["phases"].values())
    assert set(stage["bytes"]) <= set(Item)
    time = tree["time"]
    assert sum(time["phases"].values()) == pytest.approx(sum(time["work"].values()))


def test_search_leaves_no_layout_out(tmp_path, capsys):
    words = ["model=tiny_glm_dsa", *SMALL, "search=true", "num_gpus=8", "hardware=h100", "format=json"]
    assert main([*words, f"run_dir={tmp_path}"]) == 0
    tree = json.loads(capsys.readouterr().out)
    # (tp, pp, cp, dp) of 8, each with every divisor of its 8 / pp as ep
    shapes = [
        (tp, pp, cp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if 8 % (tp * pp * cp) == 0
    ]
    wanted = sum(len([ep for ep in (1, 2, 4, 8) if (8 // pp) % ep == 0]) for _, pp, _ in shapes)
    assert len(tree["layouts"]) + sum(tree["illegal"].values()) == wanted
    assert any(reason.startswith("parallel.tp") for reason in tree["illegal"])  # 4 heads do not go over 8
    steps = [found["time"]["step_seconds"] / found["parallel"]["dp"] for found in tree["layouts"] if found["fits"]]
    assert steps == sorted(steps)


def test_a_dry_run_is_compared_at_one_moment():
    """Its peak may be another moment than the formula's: both columns are of its own, and add up."""
    config = resolve_hardware(load_config([*SMALL, "parallel.pp=2"]))
    stage = plan_memory(Layout(config, Workload.of(config), 2)).worst
    other = next(name for name in stage.phases if name != stage.phase)
    items = {Item.WEIGHTS: 3_000_000, Item.STATE: 4_000_000}
    result = DryRunResult(0, (Phase(other, 7_000_000, items, {}, 0, 1.0, 1),))
    note, worst, *table = compare_dry_run(stage, result, seconds=83.4).splitlines()
    assert "83 s" in note and stage.phase in worst
    assert f"formula, {other}" in table[0] and f"dry run, {other}" in table[0]
    for column in (-2, -1):
        *parts, total = (float(line.split()[column]) for line in table[2:])
        assert sum(parts) == pytest.approx(total, abs=0.0005 * len(table))  # printed in thousandths


def test_host_memory_of_a_rank_and_of_a_node(tmp_path, capsys):
    words = ["model=qwen3_6_27b", "parallel=qwen_8gpu_tp4_pp2", "hardware=h200", "optimizer.optimizer_cpu_offload=true"]
    words += [*SMALL, f"run_dir={tmp_path}"]
    assert main([*words, "format=json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    totals = [sum(stage["host_bytes"].values()) for stage in tree["stages"]]
    assert totals == [stage["host_total_bytes"] for stage in tree["stages"]] and min(totals) > 40e9
    assert tree["host_bytes_of_node"] == 4 * sum(totals)
    assert main(words) == 0
    rank, node = max(totals) / 1e9, 4 * sum(totals) / 1e9
    assert f"host memory: {rank:.2f} GB a rank, {node:.2f} GB a node of 8 ranks, at the most" in capsys.readouterr().out


def test_keys_without_effect_are_said(tmp_path, capsys, caplog):
    """On stderr: standard output stays JSON. A search has pipelines, in which the key has one."""
    words = [*SMALL, "state.stage_inputs=host", "format=json", f"run_dir={tmp_path}"]
    with caplog.at_level(logging.WARNING, "longstraw_megatron"):
        main(words)
        json.loads(capsys.readouterr().out)
        assert "state.stage_inputs=host has no effect" in caplog.text
        caplog.clear()
        main([*words, "search=true", "num_gpus=2"])
        assert caplog.text == ""


def test_a_search_says_that_it_has_layouts_of_its_own(tmp_path, capsys, caplog):
    with caplog.at_level(logging.WARNING, "longstraw_megatron"):
        main([*SMALL, "search=true", "num_gpus=2", "parallel.tp=2", f"run_dir={tmp_path}"])
    assert "parallel.tp=2 has no effect: plan.search=true goes over all layouts." in caplog.text
    said = capsys.readouterr().out
    assert "-0 %" not in said and "layouts fit in" in said


def test_a_layout_that_is_too_big_says_so(tmp_path, capsys):
    words = [*SMALL, "hardware=h100", f"run_dir={tmp_path}"]
    main(words)
    assert "does not fit" not in capsys.readouterr().out
    main([*words, "hardware.memory_bytes=1000"])
    assert "does not fit: " in capsys.readouterr().out


def _tree(capsys, words):
    main([*words, "format=json"])
    return json.loads(capsys.readouterr().out)


def test_groups_of_a_step(tmp_path, capsys):
    """Four groups on two replicas: twice the work, and where both prefixes of a pipeline live, twice the state."""
    words = [*SMALL, "parallel.pp=2", "num_gpus=4", "hardware=h100", f"run_dir={tmp_path}"]
    one = _tree(capsys, words)
    four = _tree(capsys, [*words, "groups_per_step=4"])
    both = _tree(capsys, [*words, "groups_per_step=4", "schedule.max_live_prefixes=4"])
    state = [tree["stages"][0]["bytes"]["state"] for tree in (one, four, both)]
    assert state == [state[0], state[0], 2 * state[0]]
    assert four["time"]["phases"]["prefill"] == pytest.approx(2 * one["time"]["phases"]["prefill"])


def test_a_step_that_reuses_the_state_has_no_prefill(tmp_path, capsys):
    words = [*SMALL, "gradient=detached", "state.reuse_steps=2", "hardware=h100", f"run_dir={tmp_path}"]
    time = _tree(capsys, words)["time"]
    assert time["reusing_step_seconds"] == pytest.approx(time["step_seconds"] - time["phases"]["prefill"])
    assert _tree(capsys, [word for word in words if "reuse" not in word])["time"]["reusing_step_seconds"] is None
    main(words)
    assert "step that reuses the state" in capsys.readouterr().out


def test_longer_prompts_take_longer_and_more(tmp_path, capsys):
    found = []
    for length in (65536, 262144):
        words = ["model=qwen3_6_27b", "parallel=qwen_8gpu_tp4_cp2", "hardware=h20_141gb", f"prompt_length={length}"]
        main([*words, "segment_length=16384", "format=json", f"run_dir={tmp_path}"])
        found.append(json.loads(capsys.readouterr().out))
    short, long = found
    state = [tree["stages"][0]["bytes"]["state"] for tree in found]
    assert state[1] / state[0] == pytest.approx(4, rel=1e-3)
    # attention is quadratic in the prompt: 16 times, less what the responses' own attention adds linearly
    assert 10 < long["time"]["work"]["attention"] / short["time"]["work"]["attention"] < 16
    assert long["time"]["work"]["delta rule"] / short["time"]["work"]["delta rule"] < 4


@pytest.mark.parametrize("name", sorted(path.stem for path in (config_dir() / "hardware").glob("[!_]*.yaml")))
def test_every_hardware_file(name):
    hardware = load_config([f"hardware={name}"]).hardware
    assert hardware.name == name and (hardware.memory_bytes is None) == (name == "cpu")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hardware=h100", "device=cpu"], "hardware=h100 is a cuda device, got device=cpu"),
        (["hardware=a100"], "h100"),
        (["hardware.efficiency.matmul=1.5"], "at most 1"),
        (["hardware.link_bandwidth=0"], "hardware.link_bandwidth"),
        (["num_gpus=3", "parallel.cp=2"], "multiple of"),
        (["num_gpus=0"], "plan.num_gpus"),
        (["parallel.tp=5"], "parallel.tp=5 does not divide"),
        (["search=true", "draw=true"], "plan.draw=true is for one layout"),
        (["search=true"], "plan.search=true needs the number of GPUs, got plan.num_gpus=null; set num_gpus=N."),
        (["searches=true"], "Unknown key 'searches'"),
        (["parallel.etp=2"], "parallel.etp=2 cuts experts, but the model has none"),
        (["hardware.memory_bytes=0"], "hardware.memory_bytes must be at least 1, got 0"),
        (["prompt_length=99999999999999999999"], "prompt_length must be at most 2147483647"),
        (["run_dir=/proc/x"], "run_dir=/proc/x can't be made: "),
    ],
)
def test_refusals(words, says):
    with pytest.raises(RefusedError) as refusal:
        main(words)
    assert says in str(refusal.value)
