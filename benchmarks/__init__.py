"""Measurements of flexattn and its peers. Each module is a program: `python -m benchmarks.attention --help`."""
