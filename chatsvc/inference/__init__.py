"""Engines: text in, text out, token by token. One contract, one file a backend."""
