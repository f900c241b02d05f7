"""Real trainings with one slow rank in each parallel mode, and whether that rank is named."""
