"""Tests of the launches that are counted from outside."""
