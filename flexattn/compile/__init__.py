"""Problem -> KernelPlan -> KernelSource: tiles, shared memory, lowered mods, filled templates. Nothing runs here."""
