"""Turning a folder that somebody else exported into a package, without touching what is in it."""
