"""Neighbors newer than those of the distribution that the other tests run on."""
