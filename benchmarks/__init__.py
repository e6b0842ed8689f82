"""Measurements of flexattn beside its peers; each module is a program: `python -m benchmarks.attention --help`."""
