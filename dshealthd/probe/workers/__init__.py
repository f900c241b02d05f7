"""The processes that run collectives, started, followed and ended by the agent."""
