"""The other doors: doctor, command names, the script that writes the demo's rollouts."""

import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

from longstraw_megatron import doctor, train
from longstraw_megatron.cli import main
from longstraw_megatron.compose import config_dir
from longstraw_megatron.rollouts import read_rollouts

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_doctor_tells_versions_and_devices(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("torch", "megatron-core", "transformer-engine", "flash-linear-attention", "apex", "cpu"):
        assert word in out


def test_doctor_knows_the_wrong_apex(tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    finding = doctor.check_apex([str(tmp_path)], has_gpu=True)
    assert "wrong" in str(finding).lower() or "not nvidia" in str(finding).lower(), finding


def test_unknown_commands_are_refused(capsys):
    assert main(["bnch"]) == 2
    assert "bench" in capsys.readouterr().err
    assert main([]) == 2


def test_an_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupted)
    assert main(["doctor"]) == 130
    monkeypatch.setattr(train, "load_config", interrupted)
    assert train.main([]) == 130
    assert capsys.readouterr().err == "longstraw: interrupted\nlongstraw_megatron: interrupted\n"


def test_a_reader_that_has_enough_is_no_error():
    program = "import sys; from longstraw_megatron import cli, doctor; doctor.main = lambda _: print('word ' * 99999)"
    command = [sys.executable, "-c", f"{program}; sys.exit(cli.main(['doctor']))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(4) == "word"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_full_disk_is_one_line(capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "plan_memory.png")

    monkeypatch.setattr(doctor, "main", full)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "longstraw: [Errno 28] No space left on device: 'plan_memory.png'\n"


def test_every_command_has_help(capsys):
    assert main(["plan", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("longstraw plan: memory by item") and "search=true" in said
    chosen = sorted(path.stem for path in (config_dir() / "hardware").glob("[!_]*.yaml"))
    assert sorted(said.split("hardware=")[1].split()[0].split("|")) == chosen


def test_the_demos_rollouts_are_the_manual(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        subprocess.run(
            [sys.executable, EXAMPLES / "make_manual_rollouts.py", "--prompt-length", "2000", "--out", tmp_path / name],
            check=True,
            capture_output=True,
        )
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    (group,) = read_rollouts(tmp_path / "a.jsonl", tokenizer="bytes", vocab_size=256)
    topics = pydoc_data.topics.topics
    manual = "\n".join(topics[key] for key in sorted(topics)).encode()
    (true,) = [branch for branch in group.branches if branch.reward == 1.0]
    assert group.group_size == 8 and sum(branch.reward for branch in group.branches) == 1.0
    prompt = group.prompt_tokens.astype("uint8").tobytes()
    assert prompt in manual and prompt + true.tokens.astype("uint8").tobytes() in manual
    for other in group.branches:
        if other is not true:
            assert other.tokens.astype("uint8").tobytes() in manual
            assert prompt + other.tokens.astype("uint8").tobytes() not in manual
