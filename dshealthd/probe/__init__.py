"""Small collectives between nodes, and the verdicts that identify the slow or broken part."""
