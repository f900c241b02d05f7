"""Planned work on this node, for which nobody is to be paged."""
