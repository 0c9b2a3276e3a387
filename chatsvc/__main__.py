"""Placeholder, replaced in the commits that follow."""
