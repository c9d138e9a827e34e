"""Linear attention from a tunable Taylor expansion, and its fit."""
