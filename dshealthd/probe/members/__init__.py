"""Who takes part in probes, which of them this node is, and who meets whom in which epoch."""
