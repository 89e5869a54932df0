"""Readers of rollout dumps: files of prompt groups in, `batch.PromptGroup` out."""

from longstraw_megatron.rollouts.reader import FORMATS, length_warnings, read_rollouts
from longstraw_megatron.rollouts.tokenizer import Tokenizer, load_tokenizer

__all__ = ["FORMATS", "Tokenizer", "length_warnings", "load_tokenizer", "read_rollouts"]
