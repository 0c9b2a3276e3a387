"""Chaos: replicas under kills, outages and cuts, clients that render by the rules, and a check of the laws at the end.

``python -m chaos`` with ``tests/`` on the path, or ``make chaos``.
"""
