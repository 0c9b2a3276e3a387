"""chatsvc: a self-hosted chat service whose replies outlive connections."""

__version__ = "0.1.0"
