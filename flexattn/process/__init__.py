"""State of the process: settings, fork-safe locks, caches of tensors, progress lines."""
