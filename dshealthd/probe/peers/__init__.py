"""Calls between agents: who may call, what a message may hold, and what a missing answer means."""
