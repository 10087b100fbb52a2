"""Benchmarks: how long a form of a module takes, and how near to the truth it comes while doing so."""
