"""One round: agreed on, run, and put together into what all its members share."""
