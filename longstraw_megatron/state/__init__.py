"""Prefix state: what a prompt leaves for the tokens behind it."""

from longstraw_megatron.state.boundaries import BoundaryStates
from longstraw_megatron.state.pages import Page, PagedRows, PageView
from longstraw_megatron.state.prefix import OWNED_KINDS, PrefixState, StateOptions
from longstraw_megatron.state.residence import OnDevice, Residence

__all__ = [
    "OWNED_KINDS",
    "BoundaryStates",
    "OnDevice",
    "Page",
    "PageView",
    "PagedRows",
    "PrefixState",
    "Residence",
    "StateOptions",
]
