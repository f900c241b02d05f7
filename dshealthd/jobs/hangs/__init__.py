"""Hang detection: whether a job is hung on this node, since when, and the cause."""
