"""Tiles measured on the user's GPU."""
