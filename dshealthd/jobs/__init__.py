"""Training jobs as this node sees them: their processes, and the environments that they run in."""
