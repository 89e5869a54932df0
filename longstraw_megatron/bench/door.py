"""The command: every method in its own processes, one after the other, then tables or JSON on standard output."""

import json
import logging
import math
import sys
import time
from collections.abc import Sequence

import torch

from longstraw_megatron.bench.launch import Failure, run_method
from longstraw_megatron.bench.report import format_report, make_report, wrong_gradients
from longstraw_megatron.bench.workload import make_groups
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import Config, check_world_size, resolve_auto
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.rollouts import length_warnings

logger = logging.getLogger("longstraw_megatron")


def num_ranks_of(config: Config) -> int:
    """The fewest processes that the layout divides."""
    p = config.parallel
    return math.lcm(p.tp * p.cp * p.pp, p.ep * p.etp * p.pp)


def main(overrides: Sequence[str]) -> int:
    """Exit code: 0 done, 1 where a method failed or a gradient is not dense training's. Raises RefusedError."""
    config = resolve_auto(load_config(overrides), cuda_available=torch.cuda.is_available())
    if config.state.reuse_steps:
        raise RefusedError(
            f"state.reuse_steps={config.state.reuse_steps} is for steps that follow each other, and longstraw bench "
            "measures single ones, prefill included; set state.reuse_steps=0."
        )
    num_ranks = num_ranks_of(config)
    check_world_size(config, num_ranks)
    for warning in length_warnings(make_groups(config, 1), config.model.hf_config.get("max_position_embeddings")):
        logger.warning(warning)
    results = {}
    for method in config.bench.methods:
        start = time.perf_counter()
        print(f"{method}: running", file=sys.stderr, flush=True)
        result = results[method] = run_method(method, list(overrides), num_ranks=num_ranks)
        outcome = result.reason if isinstance(result, Failure) else "done"
        print(f"{method}: {outcome} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    report = make_report(config, results, num_ranks=num_ranks)
    print(json.dumps(report, indent=2) if config.format == "json" else format_report(report), flush=True)
    wrong = wrong_gradients(report)
    if wrong:
        print(f"longstraw: the gradient of {', '.join(wrong)} is not that of dense training.", file=sys.stderr)
    return 1 if wrong or any(isinstance(result, Failure) for result in results.values()) else 0
