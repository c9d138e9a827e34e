"""What attention costs: FLOPs by formula."""
