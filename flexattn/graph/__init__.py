"""ModGraph: the scalar program of a mod, its operators, its derivatives, its bounds and what is proved of it."""
