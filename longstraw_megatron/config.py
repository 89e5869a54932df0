"""What a run can be told: frozen dataclasses, filled from the YAML files of `hydra_configs/`, which hold the defaults.

`build_config(tree)` turns a plain tree of dicts, lists and numbers into a `Config`. Everything that can be judged
without a model or a process group is judged here, in one sentence that names the key.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longstraw_megatron.config_tree import parse_dataclass
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.functional.objective_config import ObjectiveConfig
from longstraw_megatron.hf_config import read_hf_config


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's shape, in the keys of a Hugging Face config.json, and where its weights are."""

    name: str
    hf_path: str | None  # a checkpoint folder: config.json and safetensors; None: random weights of `hf_config`
    hf_config: dict[str, Any]  # the text model's config.json; that of `hf_path` where one is given


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    path: str | None  # a file of prompt groups; rollouts/native.py has its format
    format: Literal["auto", "jsonl"]  # auto: by the file's name
    tokenizer: str | None  # for text instead of tokens: `bytes`, or a folder or file that holds a tokenizer.json


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    hf_path: str | None  # checkpoint folder of the reference policy; None: the file must have ref_logprobs if needed


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Megatron's sizes; the data-parallel size follows from the number of processes."""

    tp: int  # tensor
    cp: int  # context
    pp: int  # pipeline
    vpp: int  # virtual stages on each pipeline rank
    ep: int  # expert
    etp: int  # tensor, inside an expert
    sp: bool  # `auto` in the files: whether tp > 1
    stages: tuple[int, ...] | None = None  # layers of each of the pp * vpp stages; None: as even as is legal


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    timeout_s: int  # how long a silent rank is waited for, seconds


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """The prefix state of a prompt."""

    # where it rests between uses; host: pinned memory, of which a page is copied while the one before is computed with
    location: Literal["device", "host"]
    page_length: int  # rows of a page; pages of GLM's latents on the device have up to 2**20, whatever this says
    grad_dtype: Literal["auto", "fp32", "bf16"]  # of the gradient accumulators; auto: fp32, fp64 for precision=fp64
    stage_inputs: Literal["device", "host"]  # where a pipeline stage keeps its input of every prompt segment
    grad_rounding: Literal["nearest", "stochastic"]  # of sums to bf16 accumulators; docs/precision.md compares
    reuse_steps: int  # optimizer steps for which a detached prompt's state is kept beyond its own
    reuse_check_every: int | None  # of those, the ones in which drift is measured with a fresh capture; None: never


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    max_live_prefixes: int  # prompts of one stage whose state is held at the same time


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; names are those of Megatron's optimizer and its learning-rate schedule where both have them."""

    lr: float
    min_lr: float
    lr_decay_style: Literal["constant", "linear", "cosine"]
    lr_warmup_steps: int
    lr_decay_steps: int | None  # None: trainer.max_steps
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float  # 0: no clipping
    optimizer_cpu_offload: bool  # main weights and moments in host memory, and the update there
    optimizer_offload_fraction: float  # of the parameters, whose update goes to the host; above 0
    grad_reduce_in_fp32: bool  # bf16 weights: main gradients in float32; false: in bf16, half the memory


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    max_steps: int  # optimizer steps
    save_dir: str | None  # folder for checkpoints: weights, optimizer, step; None: none are written
    save_every: int | None  # steps between checkpoints; None with a save_dir: after the last step only
    keep: int | None  # newest checkpoints that are kept; None: all
    resume: str | None  # a checkpoint folder, or `auto`: the newest in save_dir, if there is any
    export_grads: str | None  # file for the first step's unsharded gradient, safetensors under Hugging Face names
    export_logprobs: str | None  # file for the responses' logprobs, before any update, JSON lines
    export_hf: str | None  # folder for the final weights as a Hugging Face checkpoint


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    name: str | None
    group: str | None
    job_type: str | None
    id: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    methods: tuple[Literal["dense", "dense_recompute", "exact", "detached"], ...]  # each in a process of its own
    repeats: int  # of each method; the fastest counts


@dataclass(frozen=True, kw_only=True)
class FlopsConfig:
    """Dense FLOP/s of a device by the dtype that is multiplied."""

    bf16: float
    fp32: float
    fp64: float


@dataclass(frozen=True, kw_only=True)
class EfficiencyConfig:
    """The parts of a peak rate that are reached: measured, or an estimate where the file says nothing."""

    matmul: float
    attention: float  # softmax attention, of the matmul peak
    delta_rule: float  # of the matmul peak
    index: float  # scores and top-k of sparse attention's indexer, of the matmul peak
    sparse_attention: float  # over gathered rows, of the matmul peak
    memory: float
    link: float
    network: float
    host: float


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """A device and its links, for the planner. Rates are per second, of one device, in one direction."""

    name: str
    device: Literal["cpu", "cuda"]
    memory_bytes: int | None  # as the driver reports it; None: what this machine has free
    matmul_flops: FlopsConfig
    memory_bandwidth: float
    link_bandwidth: float  # between the devices of a node
    network_bandwidth: float  # of a device's share, between nodes
    host_bandwidth: float  # to host memory
    gpus_per_node: int
    reserved_bytes: float  # context, NCCL and cuBLAS: what no tensor takes
    fragmentation: float  # of what a step allocates, the part that the allocator can't use again
    efficiency: EfficiencyConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    search: bool  # rank all layouts of `num_gpus` instead of planning `parallel`
    num_gpus: int | None  # None: the fewest that the layout divides
    dry_run: bool  # run the worst rank on fake tensors too
    draw: bool  # the schedule as text, and as a PNG in run_dir
    enforce: bool  # train.py: refuse what doesn't fit the device


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. Lengths are in tokens."""

    model: ModelConfig
    rollouts: RolloutsConfig
    reference: ReferenceConfig
    gradient: Literal["exact", "detached"]  # detached stops at the prompt's state
    trainable: Literal["all"] | tuple[str, ...]  # patterns of Megatron's names in the unsharded model; others freeze
    objective: ObjectiveConfig
    parallel: ParallelConfig
    dist: DistConfig
    segment_length: int  # prompt tokens of a forward and its backward, on all CP ranks: activations grow with it
    branches_per_microbatch: int  # responses that are replayed together: activations grow with it
    response_block: int | None  # tokens of a response whose graph exists at the same time; None: whole responses
    recompute: Literal["none", "full", "selective"]  # Megatron's: of layers, or of core attention only
    groups_per_step: int | Literal["all"]  # prompt groups of an optimizer step; all: the whole file
    logprob_block: int  # response tokens whose logits exist at the same time
    state: StateConfig
    schedule: ScheduleConfig
    precision: Literal["auto", "bf16", "fp32", "fp64"]  # auto: bf16 on a GPU, fp32 on a CPU
    device: Literal["auto", "cpu", "cuda"]  # auto: a GPU where torch sees one
    seed: int
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    run_dir: str  # folder for metrics.jsonl and W&B's offline files
    wandb: WandbConfig
    prompt_length: int  # this and the next three: the workload and output of `longstraw bench` and `longstraw plan`
    response_length: int
    group_size: int
    format: Literal["table", "json"]
    bench: BenchConfig
    hardware: HardwareConfig  # what `longstraw plan` plans for
    plan: PlanConfig

    def __post_init__(self):
        _check(self)


AT_LEAST = {
    0: ("seed", "optimizer.lr", "optimizer.min_lr", "optimizer.lr_warmup_steps", "optimizer.weight_decay")
    + ("optimizer.clip_grad", "state.reuse_steps")
    + ("hardware.reserved_bytes", "hardware.fragmentation"),
    1: ("segment_length", "branches_per_microbatch", "groups_per_step", "logprob_block", "state.page_length")
    + ("response_block", "state.reuse_check_every")
    + ("schedule.max_live_prefixes", "dist.timeout_s", "trainer.max_steps", "trainer.save_every", "trainer.keep")
    + ("plan.num_gpus", "hardware.gpus_per_node", "hardware.memory_bytes")
    + ("optimizer.lr_decay_steps", "prompt_length", "response_length", "group_size", "bench.repeats")
    + tuple(f"parallel.{size}" for size in ("tp", "cp", "pp", "vpp", "ep", "etp")),
}

# torch's generators take no more, nor does the backend's timer, in milliseconds of 32 bits
# lengths are counted in 32 bits by kernels, and by Megatron's packed sequences
AT_MOST = {2**31 - 1: ("seed", "prompt_length", "response_length"), 2_000_000: ("dist.timeout_s",)}


def get_key(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_offload(optimizer: OptimizerConfig, precision: str) -> None:
    if not 0 < optimizer.optimizer_offload_fraction <= 1:
        raise RefusedError(
            f"optimizer.optimizer_offload_fraction must lie in (0, 1], got {optimizer.optimizer_offload_fraction}; "
            "optimizer.optimizer_cpu_offload=false keeps all on the device."
        )
    if optimizer.optimizer_offload_fraction != 1 and not optimizer.optimizer_cpu_offload:
        raise RefusedError(
            f"optimizer.optimizer_offload_fraction={optimizer.optimizer_offload_fraction} needs "
            "optimizer.optimizer_cpu_offload=true, got false; set both."
        )
    if optimizer.optimizer_cpu_offload and precision not in ("auto", "bf16"):
        raise RefusedError(
            f"optimizer.optimizer_cpu_offload=true takes bf16 weights (Megatron's takes no others), got "
            f"precision={precision}; set precision=bf16."
        )


def copies_beside_prefix(optimizer: OptimizerConfig, state: StateConfig, precision: str) -> bool:
    """Whether the update makes a float32 copy of bf16 main gradients while a prefix is still on the device.

    The host's optimizer makes none there of what it updates; a prefix that is not used again is gone by then.
    """
    all_on_host = optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction == 1
    copies = precision == "bf16" and not optimizer.grad_reduce_in_fp32 and not all_on_host
    return copies and state.reuse_steps > 0 and state.location == "device"


def _check(config: Config) -> None:
    for least, keys in AT_LEAST.items():
        for key in keys:
            value = get_key(config, key)
            if isinstance(value, int | float) and not value >= least:
                raise RefusedError(f"{key} must be at least {least}, got {value}; give it such a value.")
    for most, keys in AT_MOST.items():
        for key in keys:
            if (value := get_key(config, key)) > most:
                raise RefusedError(f"{key} must be at most {most}, got {value}; give it such a value.")
    parallel, trainer, optimizer = config.parallel, config.trainer, config.optimizer
    if config.state.reuse_steps and config.gradient == "exact":
        raise RefusedError(
            f"state.reuse_steps={config.state.reuse_steps} needs gradient=detached, got exact, whose walk under new "
            "weights against old state is the gradient of nothing; set state.reuse_steps=0."
        )
    if copies_beside_prefix(optimizer, config.state, config.precision):
        raise RefusedError(
            f"state.reuse_steps={config.state.reuse_steps} needs an update without float32 copies of gradients while "
            "it keeps a prefix on the device, got optimizer.grad_reduce_in_fp32=false, whose gradients the device's "
            "optimizer copies; set optimizer.optimizer_cpu_offload=true for all parameters, state.location=host or "
            "optimizer.grad_reduce_in_fp32=true."
        )
    if config.state.grad_rounding == "stochastic" and config.state.grad_dtype != "bf16":
        raise RefusedError(
            f"state.grad_rounding=stochastic needs state.grad_dtype=bf16, got {config.state.grad_dtype}, to which "
            "nothing is rounded; leave state.grad_rounding=nearest."
        )
    if parallel.sp and parallel.tp == 1:
        raise RefusedError("parallel.sp=true needs parallel.tp above 1, got 1; leave parallel.sp=auto.")
    if parallel.vpp > 1 and parallel.pp == 1:
        raise RefusedError(f"parallel.vpp={parallel.vpp} needs parallel.pp above 1, got 1; set parallel.vpp=1.")
    if parallel.stages is not None and len(parallel.stages) != parallel.pp * parallel.vpp:
        raise RefusedError(
            f"parallel.stages={list(parallel.stages)} must name the layers of each of the pp * vpp = "
            f"{parallel.pp * parallel.vpp} stages, got {len(parallel.stages)}; leave it to parallel.stages=null."
        )
    if config.precision == "fp64" and config.device == "cuda":
        raise RefusedError("precision=fp64 runs on device=cpu only, got device=cuda; choose fp32 or bf16.")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise RefusedError(f"optimizer.betas must lie in [0, 1), got {list(optimizer.betas)}.")
    if not optimizer.eps > 0:
        raise RefusedError(f"optimizer.eps must be above 0, got {optimizer.eps}.")
    if optimizer.min_lr > optimizer.lr:
        raise RefusedError(f"optimizer.min_lr must not exceed optimizer.lr, got {optimizer.min_lr} and {optimizer.lr}.")
    _check_hardware(config.hardware)
    _check_offload(optimizer, config.precision)
    if trainer.save_dir is None:
        for key, value in (("save_every", trainer.save_every), ("keep", trainer.keep)):
            if value is not None:
                raise RefusedError(f"trainer.{key}={value} needs trainer.save_dir, got none; name a folder.")
        if trainer.resume == "auto":
            raise RefusedError("trainer.resume=auto looks in trainer.save_dir, got none; name the folder.")


def _check_hardware(hardware: HardwareConfig) -> None:
    rates = {"": hardware, "matmul_flops.": hardware.matmul_flops, "efficiency.": hardware.efficiency}
    for prefix, group in rates.items():
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            is_part = prefix == "efficiency."
            if not (is_part or prefix or field.name.endswith("_bandwidth")):
                continue
            if not value > 0 or (is_part and value > 1):
                wanted = "above 0 and at most 1" if is_part else "above 0"
                raise RefusedError(f"hardware.{prefix}{field.name} must be {wanted}, got {value}.")


def check_world_size(config: Config, world_size: int) -> int:
    """The data-parallel size that `world_size` processes leave; refused where the layout doesn't divide it."""
    p = config.parallel
    for sizes, product in (("tp * cp * pp", p.tp * p.cp * p.pp), ("ep * etp * pp", p.ep * p.etp * p.pp)):
        if world_size % product:
            raise RefusedError(
                f"The number of processes must be a multiple of parallel.{{{sizes}}} = {product}, got {world_size}; "
                "change --nproc-per-node (num_gpus in a plan) or the parallel sizes."
            )
    return world_size // (p.tp * p.cp * p.pp)


def resolve_auto(config: Config, *, cuda_available: bool) -> Config:
    """`device` and `precision` with `auto` replaced: CUDA and bf16 where there is a GPU, else CPU and fp32."""
    if config.device == "cuda" and not cuda_available:
        raise RefusedError(
            "device=cuda needs a GPU that torch can see, got none; set device=cpu or run longstraw doctor."
        )
    device = ("cuda" if cuda_available else "cpu") if config.device == "auto" else config.device
    precision = ("bf16" if device == "cuda" else "fp32") if config.precision == "auto" else config.precision
    ep, etp = config.parallel.ep, config.parallel.etp
    if device == "cpu" and ep > 1 and etp > 1:
        raise RefusedError(
            f"parallel.etp={etp} with parallel.ep={ep} gathers unequal numbers of tokens, got device=cpu, whose gloo "
            "takes equal ones only; set parallel.etp=1 or use a GPU."
        )
    return dataclasses.replace(config, device=device, precision=precision)


def build_config(tree: dict[str, Any]) -> Config:
    """A `Config` of a plain tree that has every key.

    `parallel.sp=auto` becomes whether tp > 1, and `model.hf_config` that of `model.hf_path` where one is given.
    RefusedError names the first key that is unknown or has a bad value.
    """
    parallel, model = tree.get("parallel"), tree.get("model")
    if isinstance(parallel, dict) and parallel.get("sp") == "auto":
        tree = tree | {"parallel": parallel | {"sp": isinstance(parallel.get("tp"), int) and parallel["tp"] > 1}}
    if isinstance(model, dict) and model.get("hf_path") is not None:
        hf_path = str(model["hf_path"])
        tree = tree | {"model": model | {"name": Path(hf_path).name, "hf_config": read_hf_config(hf_path)}}
    return parse_dataclass(Config, tree)
