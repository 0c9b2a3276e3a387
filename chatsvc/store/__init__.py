"""Postgres, the system of record. One method = one transaction; SQL by hand, in sight, parameterised."""
