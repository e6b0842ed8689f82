"""Problem -> KernelPlan -> KernelSource: kernel table, tiles, shared memory, lowered mods, filled templates."""
