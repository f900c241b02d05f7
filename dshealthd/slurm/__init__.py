"""Slurm's hooks: the health check, the prolog and the epilog of a node.

They read the findings of the node's agent, and drain the node within a budget that all nodes of the
cluster share. `check` decides, `budget` limits drains, `controller` talks to Slurm, `agent` to the
agent.
"""
