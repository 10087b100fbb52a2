"""Pruning by saliency: calibration texts, plans, domains, reports (K3.md §15)."""
