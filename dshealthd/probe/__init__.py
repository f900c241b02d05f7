"""Small collectives between nodes, and the verdict that names the slow or broken part."""
