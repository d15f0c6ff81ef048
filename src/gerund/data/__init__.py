"""Read tables and documents, embed and mine whole files, and mask or augment texts for training."""
