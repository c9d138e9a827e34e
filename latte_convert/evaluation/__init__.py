"""How close a hybrid is to its original, on samples that nothing was fitted to."""
