"""Whether a job stands still on this node, since when, and what holds it up."""
