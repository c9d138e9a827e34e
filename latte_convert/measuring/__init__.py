"""How far a hybrid is from its original, and what it costs: shared by scores, gates and reports."""
