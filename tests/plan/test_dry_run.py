"""The dry run against real tensors of a CPU in the same phases, item by item; and a real model against arithmetic."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from longstraw_megatron import cli
from longstraw_megatron.compose import load_config
from longstraw_megatron.errors import DryRunError, RefusedError
from longstraw_megatron.mcore.learner import Learner
from longstraw_megatron.mcore.model import BuildOptions, build_model, wrap_ddp
from longstraw_megatron.mcore.optimizer import build_optimizer
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.session import fill_weights, learner_options
from longstraw_megatron.plan import dry_run as dry_run_module
from longstraw_megatron.plan.dry_run import dry_run
from longstraw_megatron.plan.dry_run_worker import resolved, run_dry
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import plan_memory
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.planner import resolve_hardware
from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.memory import peak_memory

WORKLOAD = ["prompt_length=650", "response_length=40", "group_size=2"]
CUT = ["segment_length=128", "state.page_length=192", "logprob_block=16"]


def _config(*overrides):
    return resolved(load_config(["device=cpu", *CUT, *WORKLOAD, *overrides]))


def _dry(rank, world_size, overrides):
    config = _config(*overrides)
    return run_dry(config, Workload.of(config), rank=0, world_size=1)


def _held_bytes(chunks) -> int:
    """Parameters, buffers, and the constants that modules and their token dispatchers hold: each storage once."""
    held = [t for chunk in chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]
    for module in (module for chunk in chunks for module in chunk.modules()):
        for owner in (module, getattr(module, "token_dispatcher", None)):
            held += [t for t in vars(owner).values() if isinstance(t, torch.Tensor)] if owner is not None else []
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


def _real(rank, world_size, overrides):
    """Bytes that a real step takes: of what lives long by item, and the peak of each action over nothing at all."""
    config = _config(*overrides)
    context = init_parallel(config.parallel, device=torch.device("cpu"), seed=1, timeout_s=60)
    peaks, states = {}, {}
    with peak_memory() as memory:
        chunks = build_model(config.model.hf_config, BuildOptions(config.precision, config.recompute), context)
        fill_weights(chunks, config, context, None)
        chunks = wrap_ddp(chunks, context, use_distributed_optimizer=False)
        weights = _held_bytes(chunks)  # before a pass: a dispatcher keeps its last tokens' routing
        optimizer = build_optimizer(
            config.optimizer, chunks, context, precision=config.precision, use_distributed_optimizer=False
        )

        def progress(action):
            peaks[action.op.name] = max(memory.peak, peaks.get(action.op.name, 0))
            states[action.op.name] = learner.engine.state_bytes()
            memory.reset_peak()

        learner = Learner(chunks, context, learner_options(config, context))
        learner.engine.progress = progress
        optimizer.step()  # makes the moments
        memory.reset_peak()
        learner.compute_gradients([Workload.of(config).group()])
    moments = [t for s in optimizer.optimizer.state.values() for t in s.values() if t.dim()]
    static = {
        Item.WEIGHTS: weights,
        Item.GRADIENTS: sum(p.main_grad.nbytes for chunk in chunks for p in chunk.parameters() if p.requires_grad),
        Item.OPTIMIZER: sum(t.nbytes for t in moments),
    }
    return static, states, peaks


@pytest.mark.parametrize("model", ["tiny_qwen_hybrid", "tiny_glm_dsa"])
def test_items_are_those_of_a_real_step(model):
    overrides = [f"model={model}", "recompute=full"]
    (dry,) = run_ranks(1, _dry, overrides, init=False)
    ((static, states, peaks),) = run_ranks(1, _real, overrides)
    phases = {phase.name: phase for phase in dry.phases}
    replayed = states["BACKWARD"]
    want = static | {
        Item.STATE: replayed["rows"] + replayed["experts"],
        Item.STATE_GRADIENTS: replayed["rows_grad"],
        Item.BOUNDARIES: replayed["boundaries"],
    }
    few = {Item.OPTIMIZER: 64}  # a few numbers of the optimizer's own
    for name, action in (("replay", "BACKWARD"), ("walk", "PROMPT_BACKWARD")):
        got = phases[name].items
        assert {item: pytest.approx(got.get(item, 0), abs=few.get(item, 0)) for item in want} == want
        assert sum(got.values()) == phases[name].peak
        assert phases[name].peak == pytest.approx(peaks[action], rel=0.03), name


@pytest.mark.parametrize("model", ["tiny_qwen_hybrid", pytest.param("tiny_glm_dsa", marks=pytest.mark.wide)])
def test_a_response_in_blocks(model):
    overrides = [f"model={model}", "recompute=full", "response_block=16"]  # two blocks, and the last one
    (dry,) = run_ranks(1, _dry, overrides, init=False)
    ((_, states, peaks),) = run_ranks(1, _real, overrides)
    phases, replayed = {phase.name: phase for phase in dry.phases}, states["BACKWARD"]
    got = phases["block walk"].items
    assert got[Item.STATE] == replayed["rows"] + replayed["experts"]
    # accumulators come with the first gradient: a layer that selects no token of a block has none for it
    most = 1.01 if "glm" in model else 1
    assert replayed["rows_grad"] <= got[Item.STATE_GRADIENTS] <= most * replayed["rows_grad"]
    assert got.get(Item.BOUNDARIES, 0) == replayed["boundaries"]
    actions = {"block prefill": "BLOCK_PREFILL", "replay": "BACKWARD", "block walk": "BLOCK_BACKWARD"}
    for name, action in (actions | {"walk": "PROMPT_BACKWARD"}).items():
        assert phases[name].peak == pytest.approx(peaks[action], rel=0.03), name


@pytest.mark.parametrize("model", ["tiny_qwen_hybrid", pytest.param("tiny_glm_dsa", marks=pytest.mark.wide)])
def test_what_rests_on_the_host_is_in_a_cpus_memory(model):
    overrides = [f"model={model}", "recompute=full", "state.location=host"]
    (dry,) = run_ranks(1, _dry, overrides, init=False)
    ((_, _, peaks),) = run_ranks(1, _real, overrides)
    phases = {phase.name: phase for phase in dry.phases}
    for name, action in (("replay", "BACKWARD"), ("walk", "PROMPT_BACKWARD")):
        assert phases[name].host == {}
        assert phases[name].peak == pytest.approx(peaks[action], rel=0.03), name


def test_a_prompt_of_one_token_has_no_segment():
    (dry,) = run_ranks(1, _dry, ["model=tiny_qwen_hybrid", "prompt_length=1"], init=False)
    assert [phase.name for phase in dry.phases] == ["build", "replay forward", "replay"]


def _peak(rank, world_size, group_size):
    config = _config("model=tiny_qwen_hybrid", f"group_size={group_size}")
    return run_dry(config, Workload.of(config), rank=0, world_size=1).peak.peak


def test_the_number_of_responses_takes_no_memory():
    (few,), (many,) = (run_ranks(1, _peak, size, init=False) for size in (2, 64))
    assert abs(many / few - 1) < 0.001


def test_a_real_model_in_a_process_of_its_own():
    """8 layers of Qwen3.6-27B, TP4 PP2 on 8 GPUs, 2,097,152 positions, the last rank: four layers and the head."""
    overrides = ["model=qwen3_6_27b", "parallel=qwen_8gpu_tp4_pp2", "model.hf_config.num_hidden_layers=8"]
    overrides += ["recompute=full", "segment_length=16384", "state.page_length=65536", "hardware=h20_141gb"]
    config = load_config(overrides)
    workload = Workload(2_097_152, (2048,))
    result = dry_run(config, workload, rank=7, world_size=8)
    items = result.peak.items
    # parameters of a rank, in weight matrices: three delta layers, one of attention, four MLPs, a quarter of the head
    delta = 5120 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) // 4 + 5120 * 48 * 128 // 4
    attention = 5120 * (2 * 24 + 2 * 4) * 256 // 4 + 5120 * 24 * 256 // 4
    matrices = 3 * delta + attention + 4 * 3 * 5120 * 17408 // 4 + 5120 * 248320 // 4
    assert items[Item.WEIGHTS] == pytest.approx(2 * matrices, rel=0.001)
    assert items[Item.GRADIENTS] == pytest.approx(4 * matrices, rel=0.001)
    assert items[Item.OPTIMIZER] == pytest.approx(12 * matrices, rel=0.001)
    assert items[Item.STATE] == pytest.approx(2_097_151 * 2 * 256 * 2, rel=0.001)  # a key-value head, one layer
    assert items[Item.STATE_GRADIENTS] == 2 * items[Item.STATE]
    assert items[Item.STAGE_INPUTS] == pytest.approx(2_097_151 // 4 * 5120 * 2, rel=0.02)
    stages = plan_memory(Layout(resolve_hardware(config), workload, 8)).stages
    assert stages[1].tensors == pytest.approx(result.peak.peak, rel=0.03)


def test_what_the_process_refuses_is_a_refusal():
    config = load_config(["model=tiny_qwen_hybrid", "parallel.tp=3"])
    with pytest.raises(RefusedError, match=r"parallel.tp=3 does not divide[^\n]*$"):
        dry_run(config, Workload(64, (8,)), rank=0, world_size=3)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Puts Python source in the place of the process of a dry run; it finds its own folder in FOLDER."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(dry_run_module, "WORKER", "stand_in_worker")

    def put(source: str) -> None:
        (tmp_path / "stand_in_worker.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{source}")

    return put


# says when it is there, then never ends
SLEEPER = "import os, time\nopen(FOLDER + '/part', 'w').write(str(os.getpid()))\n"
SLEEPER += "os.rename(FOLDER + '/part', FOLDER + '/pid')\ntime.sleep(60)\n"
PLAN = ["plan", "plan.dry_run=true", "prompt_length=64", "response_length=8"]


def _is_gone(folder) -> bool:
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_failed_process_is_one_line_and_a_file(worker, tmp_path, capsys):
    worker("raise SystemError('first line\\nlast line')")
    assert cli.main([*PLAN, f"run_dir={tmp_path / 'run'}"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    log = tmp_path / "run" / "plan_dry_run.log"
    assert said.startswith("longstraw: The dry run of rank 0 of 1 ended with exit 1, and said 'last line'; " + str(log))
    assert "SystemError: first line" in log.read_text()


def test_a_process_that_takes_too_long_is_ended(worker, tmp_path):
    worker(SLEEPER)
    config = load_config(["model=tiny_qwen_hybrid"])
    with pytest.raises(DryRunError, match="no result after 5 s, and was ended; leave dry_run=true out"):
        dry_run(config, Workload(64, (8,)), rank=0, world_size=1, timeout_s=5)
    assert _is_gone(tmp_path)


def _ends(pid: int) -> bool:
    """Whether a process that is not ours ends within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_a_process_that_waits_ends_with_the_one_that_began_it(tmp_path):
    """However that ends: by a signal that nobody can answer, here."""
    job = (
        "import os\nfrom longstraw_megatron.plan.dry_run_worker import end_with_parent\nend_with_parent(os.getppid())\n"
    )
    (tmp_path / "worker.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{job}{SLEEPER}")
    starts = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'worker.py')!r}])"
    with subprocess.Popen([sys.executable, "-c", starts]) as parent:
        while not (tmp_path / "pid").exists():
            time.sleep(0.05)
        parent.kill()
    assert _ends(int((tmp_path / "pid").read_text()))


def test_a_dry_run_ends_with_a_command_that_is_killed_at_once():
    """The real process, at its imports; its job would come by a pipe that stays open here."""
    starts = (
        f"import os, subprocess, sys; command = [sys.executable, '-m', {dry_run_module.WORKER!r}, str(os.getpid())]"
    )
    starts += "; process = subprocess.Popen(command); print(process.pid, flush=True); process.wait()"
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", starts], stdin=read, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    ended = _ends(pid)
    os.close(read)
    os.close(write)
    assert ended


@pytest.fixture
def interruptible():
    """A shell starts what runs in its background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_process(worker, tmp_path, capsys, interruptible):
    worker(SLEEPER)

    def interrupt():
        while not (tmp_path / "pid").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)  # to this process alone: a terminal would reach the other too

    threading.Thread(target=interrupt, daemon=True).start()
    assert cli.main([*PLAN, f"run_dir={tmp_path}"]) == 130
    assert capsys.readouterr().err.endswith("longstraw: interrupted\n")
    assert _is_gone(tmp_path)
