"""The logs that training jobs write on this node, and the cause of a failure that they tell."""
