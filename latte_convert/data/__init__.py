"""Images, texts, speech and tables, read one sample at a time."""
