"""Real trainings in each parallel mode, to which things happen, and what is said about them."""
