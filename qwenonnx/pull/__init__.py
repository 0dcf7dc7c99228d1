"""Fetching checkpoints from a model hub or a package index."""
