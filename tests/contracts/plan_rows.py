"""What a statement costs Postgres, counted in rows: the same on any machine, however busy."""

import json


def only_indexes(database):
    """What is small would otherwise be read whole, and rightly so."""
    for whole in ("seqscan", "hashjoin", "mergejoin"):
        database.execute(f"SET enable_{whole} = off")


def rows_read(database, statement, params):
    """Rows that the nodes of the plan have handed on or thrown away, altogether."""
    (plans,) = database.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", params).fetchone()
    assert "Seq Scan" not in json.dumps(plans), json.dumps(plans, indent=1)
    return _rows(plans[0]["Plan"])


def _rows(node):
    kinds = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")
    here = sum(node.get(kind, 0) for kind in kinds) * node["Actual Loops"]
    return here + sum(map(_rows, node.get("Plans", ())))
