"""What is deployed beside the agent, and the programs that make it."""
