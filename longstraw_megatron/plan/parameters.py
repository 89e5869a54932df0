"""How many parameters a rank holds: counted from the tables that load and save the weights, never built.

One expert's table stands for all, so that GLM-5.2's 75 layers of 256 experts take milliseconds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from longstraw_megatron.config import ParallelConfig
from longstraw_megatron.mcore.architectures import architecture_of, glm_dsa, pipeline_layout, qwen_hybrid, text_config
from longstraw_megatron.mcore.weights.entry import Entry
from longstraw_megatron.mcore.weights.glm_dsa import layer_entries as glm_entries
from longstraw_megatron.mcore.weights.qwen_hybrid import layer_entries as qwen_entries
from longstraw_megatron.mcore.weights.table import ROUTER_BIAS, is_tied

INDEXER = ".core_attention.indexer."  # frozen: selection passes no gradient
Trains = Callable[[str], bool]  # whether a parameter with this name in the unsharded model trains


@dataclass(frozen=True)
class Parameters:
    """Elements that one rank holds. The experts are data-parallel over other ranks than the rest."""

    dense: int = 0
    expert: int = 0
    frozen_dense: int = 0  # of them, those without a gradient
    frozen_expert: int = 0
    buffers: int = 0  # float32, whatever the precision

    @property
    def total(self) -> int:
        return self.dense + self.expert

    @property
    def trained_dense(self) -> int:
        return self.dense - self.frozen_dense

    @property
    def trained_expert(self) -> int:
        return self.expert - self.frozen_expert

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_expert

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(*(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, ...]:
        return self.dense, self.expert, self.frozen_dense, self.frozen_expert, self.buffers


@dataclass(frozen=True)
class Stage:
    """One virtual stage: layers from `first` to before `stop`, counted from 0 over the model, and its ends."""

    first: int
    stop: int
    embedding: bool
    output: bool

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


def stages_of(hf: dict, parallel: ParallelConfig) -> list[Stage]:
    """The virtual stages in order, as `pipeline_layout` cuts them; stage v lives on pipeline rank v % pp."""
    layout = pipeline_layout(hf, pp=parallel.pp, vpp=parallel.vpp, stages=parallel.stages)
    sizes = [hf["num_hidden_layers"]] if layout is None else [words.count("decoder") for words in layout]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    last = len(sizes) - 1
    return [
        Stage(first, first + size, i == 0, i == last) for i, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    ]


def layer_kinds(hf: dict) -> list[tuple[str, str]]:
    """(attention, MLP) of each layer: delta, softmax, or full or shared (sparse attention with, without an indexer);
    dense or sparse."""
    if architecture_of(hf) is glm_dsa:
        return list(zip(glm_dsa.indexer_types(hf), glm_dsa.mlp_types(hf), strict=True))
    names = {"linear_attention": "delta", "full_attention": "softmax"}
    return [(names[kind], "dense") for kind in qwen_hybrid.layer_types(hf)]


def _all(name: str) -> bool:
    return True


def _elements(entry: Entry, tp_size: int) -> int:
    count = 1
    for size in entry.shard_shape(tp_size):
        count *= size
    return count


def _count(entries: Iterable[Entry], parallel: ParallelConfig, trains: Trains) -> Parameters:
    total = Parameters()
    for entry in entries:
        is_expert = entry.expert is not None
        number = _elements(entry, parallel.etp if is_expert else parallel.tp)
        if entry.megatron.endswith(ROUTER_BIAS):
            total += Parameters(buffers=2 * number)  # the bias, and the count of tokens that would update it
            continue
        frozen = 0 if INDEXER not in entry.megatron and trains(entry.megatron) else number
        total += Parameters(0, number, 0, frozen) if is_expert else Parameters(number, 0, frozen)
    return total


def layer_parameters(hf: dict, layer_idx: int, parallel: ParallelConfig, trains: Trains = _all) -> Parameters:
    """What a rank holds of one layer, counted from 0."""
    if architecture_of(hf) is not glm_dsa:
        return _count(qwen_entries(hf, layer_idx), parallel, trains)
    if layer_kinds(hf)[layer_idx][1] == "dense":
        return _count(glm_entries(hf, layer_idx), parallel, trains)
    # The table of one expert stands for all: what else depends on their number is the router.
    num_experts = hf["n_routed_experts"]
    one = _count(glm_entries(hf | {"n_routed_experts": 1}, layer_idx), parallel, trains)
    router = (num_experts - 1) * hf["hidden_size"]
    is_frozen = not trains(f"decoder.layers.{layer_idx}.mlp.router.weight")
    return Parameters(
        one.dense + router,
        one.expert * (num_experts // parallel.ep),
        one.frozen_dense + is_frozen * router,
        one.frozen_expert * (num_experts // parallel.ep),
        one.buffers * num_experts,
    )


def count_parameters(
    hf_config: dict, parallel: ParallelConfig, pp_rank: int, *, trains: Trains | None = None
) -> Parameters:
    """What each rank of pipeline rank `pp_rank` holds; its tensor-, context- and expert-parallel ranks hold as much.

    `trains` says of a name in the unsharded model whether it trains; None: all but the indexers.
    """
    hf = text_config(hf_config)
    hidden, vocab_rows, kinds = hf["hidden_size"], hf["vocab_size"] // parallel.tp, layer_kinds(hf)
    counted: dict[tuple, Parameters] = {}

    def layer(layer_idx: int) -> Parameters:
        key = kinds[layer_idx] if trains is None else layer_idx  # layers of a kind are alike but for what trains
        if key not in counted:
            counted[key] = layer_parameters(hf, layer_idx, parallel, trains or _all)
        return counted[key]

    def end(name: str, number: int) -> Parameters:
        return Parameters(dense=number, frozen_dense=0 if (trains or _all)(name) else number)

    total = Parameters()
    for stage in stages_of(hf, parallel)[pp_rank :: parallel.pp]:
        for layer_idx in stage.layers:
            total += layer(layer_idx)
        if stage.embedding:
            total += end("embedding.word_embeddings.weight", vocab_rows * hidden)
        if stage.output:
            total += end("decoder.final_layernorm.weight", hidden)
            if not (is_tied(hf) and stage.embedding):
                total += end("output_layer.weight", vocab_rows * hidden)
    return total
