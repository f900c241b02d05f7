"""The processes that run collectives; the agent starts, follows and ends them."""
