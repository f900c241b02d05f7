"""The members that take part in probes, this node among them, and who meets whom in each epoch."""
