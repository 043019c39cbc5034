"""Assumptions about the card that more than one device model makes (docs/assumptions.md)."""

TILE_D0 = 16  # what the metadata of the current graph says (§4.1)
RESET_NS = 2_000_000_000  # a reset, with the load of the model after it
