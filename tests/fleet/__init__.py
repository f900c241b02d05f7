"""Tests of the view of all members."""
