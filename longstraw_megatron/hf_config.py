"""A Hugging Face config.json, read and flattened to the language model's keys."""

import json
from pathlib import Path
from typing import Any

from longstraw_megatron.errors import RefusedError


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The text model's keys of a checkpoint folder's config.json, as `text_config` has them.

    Raises:
        RefusedError: no such file, no JSON object in it, or none that describes a language model.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise RefusedError(
            f"model.hf_path got {str(folder)!r} without a config.json in it, wanted a Hugging Face checkpoint folder; "
            "give the folder that has config.json and the safetensors files."
        )
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RefusedError(f"{file} got {error}, wanted a JSON object; repair the file.") from error
    if not isinstance(tree, dict):
        raise RefusedError(f"{file} got a JSON {type(tree).__name__}, wanted a JSON object; repair the file.")
    hf = text_config(tree)
    if "vocab_size" not in hf:
        raise RefusedError(f"{file} got no vocab_size, wanted a language model's configuration; give such a folder.")
    return hf


def text_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The text model's keys in one flat dict, with the outer `architectures` and `tie_word_embeddings`.

    Raises:
        RefusedError: a multimodal configuration whose two `tie_word_embeddings` differ.
    """
    inner = hf_config.get("text_config")
    if inner is None:
        return dict(hf_config)
    if not isinstance(inner, dict):
        raise RefusedError(
            f"config.json: text_config got a {type(inner).__name__}, wanted the language model's keys; repair it."
        )
    outer_tied, inner_tied = (part.get("tie_word_embeddings") for part in (hf_config, inner))
    if None not in (outer_tied, inner_tied) and outer_tied != inner_tied:
        raise RefusedError(
            f"config.json: tie_word_embeddings got {outer_tied} outside and {inner_tied} in text_config, wanted one "
            "value for both; correct the configuration."
        )
    tied = next((tied for tied in (outer_tied, inner_tied) if tied is not None), False)
    quantization = (
        {"quantization_config": hf_config["quantization_config"]} if hf_config.get("quantization_config") else {}
    )
    architectures = hf_config.get("architectures") or inner.get("architectures") or []
    return {**inner, **quantization, "architectures": architectures, "tie_word_embeddings": tied}
