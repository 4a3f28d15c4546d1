"""Measures steps of an engine on its ranks and fits the description of the device to them."""
