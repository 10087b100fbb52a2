"""What fits where: parameters, bytes, reads per token and machines, from a configuration alone (K3.md §15)."""
