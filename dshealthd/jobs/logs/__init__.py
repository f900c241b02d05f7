"""The logs that training jobs write on this node, and the failure causes found in them."""
