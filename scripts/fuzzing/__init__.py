"""Parts of ``scripts/fuzz.py``: what is attacked, how it is damaged, and how a command is watched."""
