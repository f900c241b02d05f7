"""A simulated GPU node under random faults for hours, its invariants checked all the while."""
