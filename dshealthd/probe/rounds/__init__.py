"""One round: agree on it, run it, and combine its results into one shared conclusion."""
