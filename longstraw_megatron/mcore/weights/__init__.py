"""Weights between Hugging Face checkpoint folders and Megatron: one table of entries, read both ways."""

from longstraw_megatron.mcore.weights.entry import Entry, Span
from longstraw_megatron.mcore.weights.gradients import complete_gradients, export_grads
from longstraw_megatron.mcore.weights.hf_folder import HfFolder, check_hf_folder
from longstraw_megatron.mcore.weights.load import load_hf_weights, megatron_state_from_hf
from longstraw_megatron.mcore.weights.names import Naming, named_weights
from longstraw_megatron.mcore.weights.random_init import init_random_weights
from longstraw_megatron.mcore.weights.save import refuse_occupied, save_hf_weights
from longstraw_megatron.mcore.weights.table import entries_of

__all__ = [
    "Entry",
    "HfFolder",
    "Naming",
    "Span",
    "check_hf_folder",
    "complete_gradients",
    "entries_of",
    "export_grads",
    "init_random_weights",
    "load_hf_weights",
    "megatron_state_from_hf",
    "named_weights",
    "refuse_occupied",
    "save_hf_weights",
]
