"""Names on both sides: a rank's Megatron parameter in the unsharded model, a Hugging Face tensor in a checkpoint."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.model import unwrap
from longstraw_megatron.mcore.weights.entry import Entry
from longstraw_megatron.mcore.weights.table import ROUTER_BIAS

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_SEQUENTIAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_HF_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
# norms of their own, as specs without fused layers have them, and where the fused ones have them
_UNFUSED_NORMS = {
    "input_layernorm.weight": (
        "self_attention.in_proj.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_weight",
    ),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
}


@dataclass(frozen=True)
class NamedWeight:
    """A tensor of this rank and its entry."""

    entry: Entry
    local_name: str
    tensor: Tensor


def unsharded_names(name: str, layer_numbers: list[int], first_expert: int) -> Iterator[str]:
    """The names that a local parameter may have in the unsharded model."""
    match = _LAYER.match(name)
    if match is None:
        yield name
        return
    prefix, rest = f"decoder.layers.{layer_numbers[int(match[1])] - 1}", match[2]
    if expert := _SEQUENTIAL_EXPERT.match(rest):
        yield f"{prefix}.mlp.experts.local_experts.{first_expert + int(expert[1])}.{expert[2]}"
    elif expert := _GROUPED_EXPERT.match(rest):
        yield f"{prefix}.mlp.experts.local_experts.{first_expert + int(expert[2])}.{expert[1]}.weight"
    else:
        yield from (f"{prefix}.{alias}" for alias in (rest, *_UNFUSED_NORMS.get(rest, ())))


def _chunk_weights(model: GPTModel, entries: dict[str, Entry], groups: ProcessGroupCollection) -> Iterator[NamedWeight]:
    layer_numbers = [layer.layer_number for layer in model.decoder.layers]
    first_expert = groups.ep.rank() * ((model.config.num_moe_experts or 0) // groups.ep.size())
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(ROUTER_BIAS))
    for local_name, tensor in (*model.named_parameters(), *buffers):
        names = unsharded_names(local_name, layer_numbers, first_expert)
        entry = next((entries[name] for name in names if name in entries), None)
        if entry is None:
            raise RefusedError(
                f"The model's parameter {local_name} got no place in Hugging Face's {len(entries)} tensors, wanted a "
                "model built from the same config.json; build it with mcore.architectures."
            )
        yield NamedWeight(entry, local_name, tensor)


def named_weights(
    model_chunks: Sequence[nn.Module], entries: dict[str, Entry], groups: ProcessGroupCollection
) -> list[NamedWeight]:
    """This rank's tensors with their entries, in the order of the model.

    Raises:
        RefusedError: a parameter without an entry, one whose shape is not its share, or a layer that lacks one.
    """
    weights: list[NamedWeight] = []
    for chunk in model_chunks:
        weights += _chunk_weights(unwrap(chunk), entries, groups)
    for weight in weights:
        wanted = weight.entry.shard_shape(tp_of(weight.entry, groups)[1])
        if tuple(weight.tensor.shape) != wanted:
            raise RefusedError(
                f"The model's parameter {weight.local_name} got shape {list(weight.tensor.shape)}, wanted "
                f"{list(wanted)} by config.json and the parallel sizes; build it with mcore.architectures."
            )
    _refuse_incomplete_layers(weights, entries, groups)
    return weights


def _refuse_incomplete_layers(
    weights: list[NamedWeight], entries: dict[str, Entry], groups: ProcessGroupCollection
) -> None:
    have = {weight.entry.megatron for weight in weights}
    layers = {_layer_of(name) for name in have} - {None}
    for name, entry in entries.items():
        # an expert lives on one expert-parallel rank
        elsewhere = entry.expert is not None and groups.ep.size() > 1
        if _layer_of(name) in layers and name not in have and not elsewhere:
            raise RefusedError(
                f"The model got no parameter for {name}, wanted one by config.json; build it with mcore.architectures."
            )


def _layer_of(name: str) -> str | None:
    match = _LAYER.match(name)
    return match[1] if match else None


def tp_of(entry: Entry, groups: ProcessGroupCollection) -> tuple[int, int]:
    """(rank, size) of the tensor parallelism that cuts this entry."""
    group = groups.tp if entry.expert is None else groups.expt_tp
    return (group.rank(), group.size()) if entry.axis else (0, 1)


@dataclass(frozen=True)
class Location:
    """Where a tensor lies in a checkpoint: rows from `start` on of `name`, or of `name[index]` for fused experts."""

    name: str
    index: int | None = None
    start: int = 0


@dataclass(frozen=True)
class Naming:
    """How a checkpoint names its tensors. Entries are written for `model.layers...` and one tensor for each expert.

    `prefix` is `model.` or, in a multimodal checkpoint, `model.language_model.`; with `fused_experts` a layer has
    `experts.gate_up_proj` [experts, 2 * size, hidden] and `experts.down_proj` [experts, hidden, size], as the modules
    of transformers 5 do.
    """

    prefix: str = "model."
    fused_experts: bool = False

    @classmethod
    def of(cls, names: Iterable[str]) -> "Naming":
        """The naming of a checkpoint with these tensors."""
        multimodal, fused = False, False
        for name in names:
            multimodal |= name.startswith("model.language_model.")
            fused |= name.endswith(".mlp.experts.gate_up_proj")
        return cls("model.language_model." if multimodal else "model.", fused)

    def name(self, source: str) -> str:
        """The checkpoint's name of an entry's source that is not a fused expert."""
        return self.prefix + source.removeprefix("model.") if source.startswith("model.") else source

    def locate(self, source: str, rows: int) -> Location:
        """Where an entry's source, of `rows` rows, lies."""
        expert = _HF_EXPERT.match(source) if self.fused_experts else None
        if expert is None:
            return Location(self.name(source))
        if expert[3] == "down":
            return Location(self.name(f"{expert[1]}.down_proj"), int(expert[2]))
        return Location(self.name(f"{expert[1]}.gate_up_proj"), int(expert[2]), rows if expert[3] == "up" else 0)

    def shapes(self, entries: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
        """The checkpoint's tensors that these entries are made of, with their shapes, in order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in entries:
            for source, (rows, *row_shape) in entry.source_shapes().items():
                place = self.locate(source, rows)
                if place.index is None:
                    shapes[place.name] = (rows, *row_shape)
                else:
                    have = shapes.get(place.name, (0, 0))
                    experts, total = max(have[0], place.index + 1), max(have[1], place.start + rows)
                    shapes[place.name] = (experts, total, *row_shape)
        return shapes
