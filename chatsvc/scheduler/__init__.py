"""Decides which run the engines work on, and sees each run through to its one end."""
