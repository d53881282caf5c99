"""Questions about a model under a plan: its tensors, their formats, cost, memory and measured errors."""
