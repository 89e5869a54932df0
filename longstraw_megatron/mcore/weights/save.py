"""Saving this job's model as a Hugging Face checkpoint folder, written by many ranks, complete or not there."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import text_config
from longstraw_megatron.mcore.weights.gather import fail_together, gather_shards, is_first_replica, tensor_group
from longstraw_megatron.mcore.weights.hf_folder import INDEX_FILE, HfFolder, refuse_unfit, unused_tensors
from longstraw_megatron.mcore.weights.names import NamedWeight, Naming, named_weights
from longstraw_megatron.mcore.weights.safetensors_file import (
    SafetensorsWriter,
    StoredTensor,
    TensorSpec,
    split_by_size,
)
from longstraw_megatron.mcore.weights.table import LM_HEAD, entries_of, is_tied

MAX_SHARD_BYTES = 4 * 2**30
# files of a checkpoint folder that go with the model whatever its weights: tokenizer, templates, generation, code
_COMPANIONS = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_MODEL_TYPES = {"Qwen3_5ForCausalLM": "qwen3_5_text", "GlmMoeDsaForCausalLM": "glm_moe_dsa"}


class _Source:
    """The checkpoint that the model came from, if any: its names, and what it has besides the trained tensors."""

    def __init__(self, path: str | Path | None, hf: dict):
        self.path = None if path is None else Path(path)
        self.naming = Naming()
        self.extras: dict[str, StoredTensor] = {}
        if path is None:
            return
        with HfFolder(path) as folder:
            refuse_unfit(folder, hf)
            # experts are saved one by one, as released checkpoints have them
            self.naming = Naming(folder.naming.prefix)
            known, unknown = unused_tensors(folder, hf)
            tied_head = {LM_HEAD} if is_tied(hf) else set()
            self.extras = {name: folder.tensors[name] for name in known + unknown if name not in tied_head}


class _ShardFiles:
    """This rank's files, filled one after the other with tensors in the order of the plan."""

    def __init__(self, folder: Path, plan: list[dict[str, TensorSpec]], names: list[str]):
        self._todo = list(zip(plan, names, strict=True))
        self._folder = folder
        self._plan: dict[str, TensorSpec] = {}
        self._writer: SafetensorsWriter | None = None

    def writer(self, name: str) -> SafetensorsWriter:
        """The open file that has the tensor `name`."""
        while name not in self._plan:
            self.close()
            self._plan, file = self._todo.pop(0)
            self._writer = SafetensorsWriter(self._folder / file, self._plan)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def save_hf_weights(
    model_chunks: Sequence[nn.Module],
    out_dir: str | Path,
    *,
    groups: ProcessGroupCollection,
    hf_config: dict,
    source_hf_path: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model as a folder that `load_hf_weights` and transformers read. Every rank calls this.

    Each pipeline stage and expert-parallel rank writes its own files; a rank holds one Megatron tensor unsharded, on
    the CPU, at a time. Tensors keep the parameters' dtype, and so does the config's. With `source_hf_path`, the folder
    that was loaded, its names are kept, and its tensors that are not trained (multi-token prediction, vision) and its
    tokenizer files are carried over; without, names are `model.layers...` and there is no tokenizer.

    All ranks see `out_dir` (one file system). It is written beside its place and renamed at the end.

    Raises:
        RefusedError: `out_dir` has something in it, or the source is not of this model.
        RuntimeError: a rank could not write; on every rank, and nothing is at `out_dir`.
    """
    hf, out_dir = text_config(hf_config), Path(out_dir)
    partial_dir = out_dir.with_name(f".{out_dir.name}.partial")
    error, source, weights, plan = None, None, [], []
    try:
        if dist.get_rank() == 0:
            refuse_occupied(out_dir)
            _make_empty(partial_dir)
        source = _Source(source_hf_path, hf)
        weights = [w for w in named_weights(model_chunks, entries_of(hf), groups) if not w.entry.duplicate]
        plan = split_by_size(_my_specs(weights, source, groups), max_shard_bytes)
    except (RefusedError, OSError) as caught:
        error = caught
    fail_together(error)

    numbers: list = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, [list(file) for file in plan])
    total, first = sum(len(files) for files in numbers), sum(len(files) for files in numbers[: dist.get_rank()])
    names = [f"model-{first + i + 1:05d}-of-{total:05d}.safetensors" for i in range(len(plan))]
    fail_together(_write_shards(weights, source, groups, _ShardFiles(partial_dir, plan, names)))

    error = None
    if dist.get_rank() == 0:
        try:
            tensors = [names for files in numbers for names in files]
            _write_index(partial_dir, tensors)
            _write_companions(partial_dir, source, hf, weights[0].tensor.dtype)
            partial_dir.rename(out_dir)
        except OSError as caught:
            error = caught
    fail_together(error)


def refuse_occupied(out_dir: str | Path) -> None:
    """Refuse a place for a checkpoint that has something in it; a run asks before it trains.

    Raises:
        RefusedError: `out_dir` is a file, or a folder that is not empty.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise RefusedError(
            f"The checkpoint folder {out_dir} got something in it, wanted a new or empty one; choose another."
        )


def _make_empty(partial_dir: Path) -> None:
    if partial_dir.exists():
        shutil.rmtree(partial_dir)  # of an earlier save that did not end
    partial_dir.mkdir(parents=True)


def _my_specs(weights: list[NamedWeight], source: _Source, groups: ProcessGroupCollection) -> dict[str, TensorSpec]:
    """What this rank writes: the tensors that come together on it, and on rank 0 the source's others."""
    specs: dict[str, TensorSpec] = {}
    for weight in weights:
        if is_first_replica(weight.entry, groups) and tensor_group(weight.entry, groups).rank() == 0:
            for name, shape in weight.entry.source_shapes().items():
                specs[source.naming.name(name)] = TensorSpec.of(weight.tensor.dtype, shape)
    if dist.get_rank() == 0:
        specs |= {name: TensorSpec(extra.dtype, extra.shape, extra.nbytes) for name, extra in source.extras.items()}
    return specs


@torch.no_grad()
def _write_shards(
    weights: list[NamedWeight], source: _Source, groups: ProcessGroupCollection, files: _ShardFiles
) -> Exception | None:
    """Gather and write. A rank that fails to write keeps gathering, so that the others do not wait for it."""
    error: Exception | None = None
    for weight in weights:
        if not is_first_replica(weight.entry, groups):
            continue
        tensor = weight.tensor.data
        shards = gather_shards(
            weight.entry, (), groups, dtype=tensor.dtype, device=tensor.device, load=lambda tensor=tensor: tensor
        )
        for name, full in weight.entry.unpack(shards, tensor_group(weight.entry, groups).size()).items():
            try:
                if error is None:
                    files.writer(source.naming.name(name)).write(source.naming.name(name), full)
            except OSError as caught:
                error = caught
    try:
        if error is None and dist.get_rank() == 0:
            for name, extra in source.extras.items():
                files.writer(name).copy(name, extra)
        files.close()
    except OSError as caught:
        error = error or caught
    return error


def _write_index(folder: Path, tensors: list[list[str]]) -> None:
    """`tensors` are those of each file, in the order of the files."""
    files = [f"model-{i + 1:05d}-of-{len(tensors):05d}.safetensors" for i in range(len(tensors))]
    weight_map = {name: file for file, names in zip(files, tensors, strict=True) for name in names}
    size = sum((folder / file).stat().st_size for file in files)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_companions(folder: Path, source: _Source, hf: dict, dtype: torch.dtype) -> None:
    if source.path is None:
        name = hf["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")  # there is no vision model
        config = {**hf, "architectures": [name], "model_type": hf.get("model_type", _MODEL_TYPES[name])}
    else:
        config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
        for file in source.path.iterdir():
            if file.suffix in _COMPANIONS and not file.name.endswith(".index.json") and file.is_file():
                shutil.copy(file, folder / file.name)
    for part in (config, config.get("text_config", config)):
        for key in {"dtype", "torch_dtype"} & part.keys() or {"dtype"}:
            part[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
