"""The fleet at a glance: what each member says of itself, asked for when somebody looks.

`summary` is what an agent tells of its node, `view` asks all members and keeps their answers for a
moment, `jobs` puts the jobs of all nodes together. It is for the first look: history is
Prometheus'.
"""
