"""Python -> ModGraph: a mod is run once under make_fx, and what it reads becomes a guard."""
