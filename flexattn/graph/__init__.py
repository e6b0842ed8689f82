"""ModGraph, the scalar program of a mod: its operators, derivatives, bounds and provable facts."""
