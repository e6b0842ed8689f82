"""State of the process: settings, locks that survive a fork, caches of tensors, progress lines."""
