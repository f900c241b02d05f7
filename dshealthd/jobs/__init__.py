"""Training jobs as this node sees them: their processes and environments."""
