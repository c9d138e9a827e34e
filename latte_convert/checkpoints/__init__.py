"""From a folder, file or Hub id to a model and its preprocessing, by library."""
