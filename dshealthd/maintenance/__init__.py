"""Planned work on this node: who says that it is under way, until when, and why.

Alerts of a node in maintenance are shown and page no one, and probes leave the node out. Each
source of maintenance keeps a file of its own below `path.state`, so that none ends another's.
"""
