"""Find, watch and convert attention in a loaded model."""
