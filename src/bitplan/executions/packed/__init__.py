"""Packed execution: tensors saved for the backward pass lie in memory in their format's own bits."""
