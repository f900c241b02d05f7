"""Planned work on this node: who declared it, until when, and why.

Alerts of a node in maintenance are shown but page no one, and probes leave the node out. Each
source of maintenance has its own file below `path.state`, so that none ends another's.
"""
