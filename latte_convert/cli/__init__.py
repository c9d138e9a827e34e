"""The `latte` command: one file per group of commands."""
