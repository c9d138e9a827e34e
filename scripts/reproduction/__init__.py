"""The tables of the source paper, row by row."""
