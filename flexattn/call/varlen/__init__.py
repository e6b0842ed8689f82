"""Sequences packed end to end in one row of query and key -> a mask and mods of one long sequence.

Query q of the long sequence belongs to sequence `sequence[q]`, and its keys are [k_start[q], k_end[q]) (packing.py).
The mods are rewritten from positions in a sequence to rows of the long one (mods.py). The block lists follow from the
interval of keys that each row attends to (block_lists.py). All of it is computed on the device, with sizes that depend
on shapes alone: the host does not wait, and a CUDA graph may contain it. No array has a size of queries x keys, except
for one bool per pair of blocks.
"""
