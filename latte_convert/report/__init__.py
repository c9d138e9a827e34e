"""What was measured, as strict JSON and as a page."""
