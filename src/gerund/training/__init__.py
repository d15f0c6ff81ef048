"""Training: recipes, objectives, several processes, checkpoints that resume exactly."""
