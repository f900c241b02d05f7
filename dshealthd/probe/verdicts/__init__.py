"""What is usual, what is not, and what that says of a node, a GPU, a NIC, a link or a leaf."""
