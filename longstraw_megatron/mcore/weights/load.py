"""Loading a Hugging Face checkpoint into this rank's model chunks, slice by slice."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.hf_config import read_hf_config
from longstraw_megatron.mcore.architectures import architecture_of, text_config
from longstraw_megatron.mcore.weights.entry import Entry
from longstraw_megatron.mcore.weights.hf_folder import HfFolder, log_unused, refuse_unfit, unused_tensors
from longstraw_megatron.mcore.weights.names import Location, NamedWeight, Naming, named_weights, tp_of
from longstraw_megatron.mcore.weights.table import EMBEDDING, LM_HEAD, entries_of, is_tied


def _read_source(folder: HfFolder, entry: Entry, source: str, rows: slice, columns: slice | None) -> Tensor:
    return folder.read(folder.naming.locate(source, entry.source_shapes()[source][0]), rows, columns)


@torch.no_grad()
def load_hf_weights(
    model_chunks: Sequence[nn.Module],
    hf_path: str | Path,
    *,
    groups: ProcessGroupCollection,
    hf_config: dict | None = None,
) -> None:
    """Fill every parameter of this rank, and the routers' correction biases, from a checkpoint folder.

    A rank reads the rows and columns that it holds and nothing else, and holds one such piece at a time. Parameters
    keep their dtype and device; frozen ones are filled too. No rank waits for another.

    `hf_config` is DIR/config.json where it is not given.

    Raises:
        RefusedError: before anything is copied, if a tensor is missing or has another shape than the model's; after,
            if the model is tied and the folder has a head that is not its embedding.
    """
    hf = text_config(hf_config) if hf_config is not None else read_hf_config(hf_path)
    architecture_of(hf).check(hf)
    entries = entries_of(hf)
    with HfFolder(hf_path) as folder:
        refuse_unfit(folder, hf)
        weights = named_weights(model_chunks, entries, groups)
        for weight in weights:
            tp_rank, tp_size = tp_of(weight.entry, groups)
            read = partial(_read_source, folder, weight.entry)
            weight.entry.fill(weight.tensor.data, read, tp_rank=tp_rank, tp_size=tp_size)
            if is_tied(hf) and LM_HEAD in folder.tensors:
                _refuse_other_head(folder, weight, tp_rank, tp_size)
        log_unused(folder, unused_tensors(folder, hf)[1])


def _refuse_other_head(folder: HfFolder, weight: NamedWeight, tp_rank: int, tp_size: int) -> None:
    """Hugging Face unties a model whose checkpoint has two different tensors."""
    for block in weight.entry.blocks(tp_rank, tp_size):
        if block.source != EMBEDDING:
            continue
        head = folder.read(Location(LM_HEAD), block.source_rows, block.source_columns)
        if not torch.equal(head.to(weight.tensor), weight.tensor.data[block.shard_rows]):
            raise RefusedError(
                f"{folder.path}: {LM_HEAD} got values of its own with tie_word_embeddings=true, wanted the "
                "embedding's; set tie_word_embeddings to false in its config.json."
            )


@torch.no_grad()
def megatron_state_from_hf(
    tensors: Mapping[str, Tensor | None], hf_config: dict, *, gradient: bool = False
) -> dict[str, Tensor]:
    """Megatron's unsharded tensors from Hugging Face's, in memory, by the same rules (for tests and small models).

    `tensors` are a module's or a checkpoint's names and values; with `gradient` they are gradients, which are not
    shifted where Megatron's norm is zero-centred. An entry any of whose sources is missing or None (no gradient) is
    left out. Names are Megatron's in the unsharded model, layers and experts counted over all ranks.
    """
    naming, state = Naming.of(tensors), {}
    for name, entry in entries_of(text_config(hf_config)).items():
        shapes = entry.source_shapes()
        places = {source: naming.locate(source, shape[0]) for source, shape in shapes.items()}
        if any(tensors.get(place.name) is None for place in places.values()):
            continue

        def read(source: str, rows: slice, columns: slice | None, places: dict[str, Location] = places) -> Tensor:
            place = places[source]
            tensor = tensors[place.name] if place.index is None else tensors[place.name][place.index]
            return tensor[place.start + rows.start : place.start + rows.stop]

        first = tensors[next(iter(places.values())).name]
        state[name] = torch.empty(entry.shape, dtype=first.dtype, device=first.device)
        entry.fill(state[name], read, tp_rank=0, tp_size=1, gradient=gradient)
    return state
