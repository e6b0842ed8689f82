"""Problem -> KernelPlan -> KernelSource: kernel table, tiles, shared memory, lowered mods, rendered templates."""
