"""The agent: one event loop that runs services, and what it says of itself."""
