"""The console script: `longstraw COMMAND KEY=VALUE ...`."""

import importlib
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
REFUSED, FAILED, INTERRUPTED = 2, 1, 130


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
    """Exit code of the command. With one sentence on stderr: 2 for what can't be done, 1 for a dry run that failed, 130
    at Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("help", "-h", "--help"):
        print(usage())
        return 0 if words else REFUSED
    command, overrides = words[0], words[1:]
    try:
        if command not in COMMANDS:
            raise refuse_unknown(command, list(COMMANDS), what="command")
        return importlib.import_module(COMMANDS[command][0]).main(overrides)
    except RefusedError as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return REFUSED
    except DryRunError as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("longstraw: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
