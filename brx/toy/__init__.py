"""Toy problems: what delay does to Adam where the landscape can be drawn."""
