"""Python -> ModGraph: a mod runs once under make_fx, and what it reads becomes a guard."""
