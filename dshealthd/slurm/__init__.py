"""Slurm's hooks: the health check, the prolog and the epilog of a node.

They read what the agent of the node has found, and drain the node within a budget that all nodes
of the cluster share. `check` decides, `budget` shares, `controller` talks to Slurm, `agent` to the
agent.
"""
