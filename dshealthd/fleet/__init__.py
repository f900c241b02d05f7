"""The fleet at a glance: each member's summary of itself, queried when somebody looks.

`summary` makes a node's own summary, `view` queries all members, caches their answers for a moment
and merges the jobs of all nodes. It is for a first look; history is in Prometheus.
"""
