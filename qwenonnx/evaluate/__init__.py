"""Fidelity of a package against a reference."""
