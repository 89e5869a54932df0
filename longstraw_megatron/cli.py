"""The console script: `longstraw COMMAND KEY=VALUE ...`."""

import importlib
import os
import sys
from collections.abc import Sequence

from longstraw_megatron.config_tree import refuse_unknown
from longstraw_megatron.errors import DryRunError, RefusedError

# Each module has main(overrides) -> exit code; imported only when it is asked for.
COMMANDS = {
    "bench": ("longstraw_megatron.bench", "dense training against gradient=detached and exact: time and peak memory"),
    "doctor": ("longstraw_megatron.doctor", "versions, devices, kernels, and what to do about what is missing"),
    "plan": ("longstraw_megatron.planner", "memory by item and seconds by phase of a layout, or of all of them"),
}
# What a command's own keys are; the others are those of training.
OWN_KEYS = {
    "plan": (
        "  prompt_length= response_length= group_size= groups_per_step=   the workload",
        "  hardware=h20_96gb|h20_141gb|h100|h200|b200|cpu  num_gpus=N      the devices",
        "  search=true        every layout of num_gpus, the fastest that fits first",
        "  dry_run=true       the worst rank's real modules, on tensors without memory",
        "  draw=true          the schedule, as text and as a picture",
        "  format=table|json",
    ),
    "bench": ("  prompt_length= response_length= group_size=   the workload", "  bench.repeats=N  format=table|json"),
}
KEYS = "hydra_configs/config.yaml has every key with its default, longstraw_megatron/config.py what each means."
REFUSED, FAILED, INTERRUPTED, CLOSED = 2, 1, 130, 141  # the last two as a shell has them: 128 + signal


def usage() -> str:
    lines = [f"  longstraw {name:<8} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        (
            "longstraw COMMAND KEY=VALUE ...",
            *lines,
            "Training: torchrun --nproc-per-node N -m longstraw_megatron.train KEY=VALUE ...",
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command: 141 where nobody reads the rest of its output.

    With one sentence on stderr: 2 for what can't be done, 1 for a dry run, a file or a disk that failed, 130 at Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("help", "-h", "--help"):
        print(usage())
        return 0 if words else REFUSED
    command, overrides = words[0], words[1:]
    if command in COMMANDS and {"-h", "--help"} & set(overrides):
        print("\n".join((f"longstraw {command}: {COMMANDS[command][1]}", *OWN_KEYS.get(command, ()), KEYS)))
        return 0
    try:
        if command not in COMMANDS:
            raise refuse_unknown(command, list(COMMANDS), what="command")
        code = importlib.import_module(COMMANDS[command][0]).main(overrides)
        sys.stdout.flush()
        return code
    except RefusedError as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return REFUSED
    except DryRunError as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # who read has enough; what is left must not fail again when the interpreter flushes it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except OSError as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("longstraw: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
