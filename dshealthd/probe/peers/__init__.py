"""Calls between agents: who may call, what a message may hold, and what it means when there is no
answer.
"""
