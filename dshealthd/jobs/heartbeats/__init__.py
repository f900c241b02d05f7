"""Reception of the heartbeats of training processes by the agent."""
