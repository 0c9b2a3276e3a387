"""The HTTP door: everything a client can say and hear."""
