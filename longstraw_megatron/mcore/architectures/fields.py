"""Reading a Hugging Face config.json dict: what must be there, what must have one value, and the rotary embedding."""

from collections.abc import Callable
from dataclasses import dataclass

from longstraw_megatron.errors import RefusedError

_ABSENT = object()


@dataclass(frozen=True)
class Rope:
    """Plain rotary embedding: `theta`, and the share of the head's dims that rotate."""

    theta: float
    partial: float


def need_int(hf: dict, key: str) -> int:
    """A positive integer that the model's shape depends on."""
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RefusedError(f"config.json: {key} got {value!r}, wanted a positive integer; complete the configuration.")
    return value


def need_number(hf: dict, key: str) -> float:
    """A positive number that the model's outputs depend on."""
    value = hf.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise RefusedError(f"config.json: {key} got {value!r}, wanted a positive number; complete the configuration.")
    return float(value)


def need_list(hf: dict, key: str, words: set[str]) -> list[str]:
    """A list with one of `words` for each layer."""
    value, num_layers = hf[key], need_int(hf, "num_hidden_layers")
    if not isinstance(value, list | tuple) or len(value) != num_layers or not set(value) <= words:
        raise RefusedError(
            f"config.json: {key} got {value!r}, wanted {num_layers} words, one for each of num_hidden_layers, out of "
            f"{sorted(words)}; correct the configuration."
        )
    return list(value)


def refuse_unless(hf: dict, wanted: dict[str, tuple]) -> None:
    """Keys that may be absent, and the values that are supported where they are there.

    Raises:
        RefusedError: the first key with another value.
    """
    for key, values in wanted.items():
        got = hf.get(key, _ABSENT)
        if got is not _ABSENT and got not in values:
            supported = " or ".join(repr(value) for value in values)
            raise RefusedError(f"config.json: {key} got {got!r}, wanted {supported}; such a model is not supported.")


def refuse_common(hf: dict) -> None:
    """What neither architecture supports: quantized weights, dropout, biases, other activations."""
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unnamed")
        raise RefusedError(
            f"config.json: quantization_config got method {method!r}, wanted none; use the checkpoint in bfloat16 or "
            "float32."
        )
    refuse_unless(
        hf,
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "attention_dropout": (0, None),
            "hidden_dropout": (0, None),
            "embd_pdrop": (0, None),
            "use_sliding_window": (False, None),
            "tie_word_embeddings": (True, False),
        },
    )
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        need_int(hf, key)
    need_int(hf, "max_position_embeddings")
    need_number(hf, "rms_norm_eps")


def rope_of(hf: dict, *, partial: float) -> Rope:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    As in transformers, a non-empty `rope_scaling` is taken before `rope_parameters`, and what is inside before what
    lies beside. `partial` is the architecture's share of rotating dims where the configuration has none. Sections of
    a multimodal embedding are accepted: for text all three positions are equal, and they change nothing.

    Raises:
        RefusedError: rotary scaling of any kind, or no theta.
    """
    inner = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in inner.values()):
        raise RefusedError(
            f"config.json: rope_parameters got one set for each of {sorted(inner)}, wanted one set for all layers; "
            "such a model is not supported."
        )
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind != "default" or inner.get("factor", 1) not in (1, None):
        raise RefusedError(
            f"config.json: the rotary embedding got type {kind!r} with factor {inner.get('factor')!r}, wanted "
            "'default' without scaling; remove the scaling, or train with the positions that the model was made for."
        )
    theta = inner.get("rope_theta", hf.get("rope_theta"))
    share = inner.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    rope = {"rope_theta": theta, "partial_rotary_factor": partial if share is None else share}
    if not 0 < need_number(rope, "partial_rotary_factor") <= 1:
        raise RefusedError(
            f"config.json: partial_rotary_factor got {share!r}, wanted more than 0 and at most 1; correct it."
        )
    return Rope(need_number(rope, "rope_theta"), need_number(rope, "partial_rotary_factor"))


def refuse_tp(tp: int, divided: dict[str, int], also: Callable[[int], bool] = lambda tp: True) -> None:
    """Refuse a tensor-parallel size that does not divide each of `divided` (name to size), or that `also` turns down.

    Raises:
        RefusedError: with the nearest size that does.
    """

    def fits(size: int) -> bool:
        return all(count % size == 0 for count in divided.values()) and also(size)

    if fits(tp):
        return
    nearest = min((size for size in range(1, max(divided.values()) + 1) if fits(size)), key=lambda size: abs(size - tp))
    uneven = ", ".join(f"{name}={count}" for name, count in divided.items() if count % tp) or "the key-value heads"
    raise RefusedError(
        f"parallel.tp={tp} does not divide {uneven}, wanted a size that cuts every weight evenly (nothing is padded); "
        f"the nearest is parallel.tp={nearest}."
    )
