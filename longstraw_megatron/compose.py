"""From KEY=VALUE words to a `Config`: the only file that knows Hydra.

Hydra's compose API is used, not its launcher, so that no rank makes folders of its own.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from longstraw_megatron.config import Config, HardwareConfig, build_config
from longstraw_megatron.config_tree import leaf_keys, refuse_unknown
from longstraw_megatron.errors import RefusedError

HF_CONFIG = "model.hf_config."
# the files of hydra_configs/hardware that have what all devices of a kind share
KINDS = {"cpu": "cpu", "cuda": "_cuda"}
ALLOWANCE = ("gpus_per_node", "reserved_bytes", "fragmentation")


def config_dir() -> Path:
    """Where the YAML files are: inside the package after an install, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "hydra_configs"
    return inside if inside.is_dir() else package.parent / "hydra_configs"


def _parse_override(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise RefusedError(
            f"{text!r} can't be read as KEY=VALUE; quote special characters as in KEY='\"a=b\"'."
        ) from error
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise RefusedError(f"{text!r} must be KEY=VALUE without +, ~ or @; every key has a default to replace.")
    if override.is_sweep_override():
        raise RefusedError(f"{text!r} names several values, but one run takes one; for a list write KEY=[A,B].")
    return override


def _check_key(override: Override, groups: dict[str, list[str]]) -> None:
    """Refuse an unknown key or an unknown choice of a group."""
    key, value = override.key_or_group, override.value()
    if key in groups:
        if value not in groups[key]:
            raise refuse_unknown(str(value), groups[key], what=f"choice of {key}")
        return
    known = leaf_keys(Config)
    inner = {name.rsplit(".", i)[0] for name in known for i in range(1, name.count(".") + 1)}
    if not key.startswith(HF_CONFIG) and key not in known and key not in inner:
        raise refuse_unknown(key, known)


def _compose(overrides: list[str]) -> dict[str, Any]:
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        tree = OmegaConf.to_container(compose(config_name="config", overrides=overrides), resolve=True)
    assert isinstance(tree, dict)
    return tree


def load_config(overrides: Sequence[str]) -> Config:
    """The defaults of `hydra_configs/` with `overrides`, KEY=VALUE in Hydra's grammar.

    RefusedError names the first override that is malformed, unknown or out of range.
    """
    groups = {
        folder.name: sorted(file.stem for file in folder.glob("[!_]*.yaml"))
        for folder in config_dir().iterdir()
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }
    parsed = {text: _parse_override(text) for text in overrides}
    for override in parsed.values():
        _check_key(override, groups)
    shape_words = [text for text, override in parsed.items() if override.key_or_group.startswith(HF_CONFIG)]
    if shape_words:
        defaults = _compose([text for text in overrides if text not in shape_words])["model"]
        if defaults["hf_path"] is not None:
            raise RefusedError(f"{shape_words[0]!r} can't change the shape that model.hf_path gives; drop one of them.")
        for text in shape_words:
            if (key := parsed[text].key_or_group).split(".")[2] not in defaults["hf_config"]:
                raise refuse_unknown(key, [HF_CONFIG + name for name in defaults["hf_config"]])
    try:
        tree = _compose(list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise RefusedError(f"The keys {' '.join(overrides)} can't be put together: {reason}.") from error
    return build_config(tree)


def run_hardware(config: Config) -> HardwareConfig:
    """`hardware` for a run on `config.device`; where it is of another kind, with the allowance of the device's kind."""
    if config.hardware.device == config.device:
        return config.hardware
    shared = OmegaConf.load(config_dir() / "hardware" / f"{KINDS[config.device]}.yaml")
    return dataclasses.replace(config.hardware, device=config.device, **{key: shared[key] for key in ALLOWANCE})
