"""Text to token ids, for rollout files that hold text: bytes, or a Hugging Face tokenizer.json."""

from pathlib import Path
from typing import Protocol

from longstraw_megatron.errors import RefusedError

END_OF_TEXT = 256  # of the byte tokenizer: the first id that is no byte


class Tokenizer(Protocol):
    """Text to ids and back. Nothing is added: no start or end token, no chat template."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """Ids 0-255 are the bytes of UTF-8; 256 ends a text and decodes to nothing."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < END_OF_TEXT).decode("utf-8", errors="replace")


class HFTokenizer:
    """A Hugging Face tokenizer.json, through the `tokenizers` package."""

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ImportError as error:
            raise RefusedError(
                f"rollouts.tokenizer={path} needs the package tokenizers, got none installed; pip install tokenizers."
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise RefusedError(f"{path} must be a tokenizer.json of Hugging Face tokenizers, got: {error}.") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder that holds one."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise RefusedError(f"rollouts.tokenizer must be bytes or the place of a tokenizer.json, got {name}.")
    return HFTokenizer(path)
