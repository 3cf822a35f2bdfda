"""Functions on tensors without parameters: blocks, attention, acceptance, loss, metrics."""
