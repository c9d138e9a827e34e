"""Softmax over nearby keys one by one and clusters of the rest."""
