"""Nearby keys one by one, and blocks of the others as each window of queries sees them."""
