"""Problem -> out, lse and gradients: one module per engine, and the operations that autograd sees."""
