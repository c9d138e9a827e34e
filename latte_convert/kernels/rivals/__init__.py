"""What near_far and latte are compared with, one kernel a file, each from its published definition."""
