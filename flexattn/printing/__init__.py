"""How an explanation is printed: one line for each kernel, and an HTML page."""
