"""The saved directory: write it atomically, read it back strictly, check it, restore the original."""
