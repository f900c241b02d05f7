"""Heartbeats of training processes, as the agent takes them in."""
