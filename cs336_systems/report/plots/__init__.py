"""Pictures of results, as PNG files: what is drawn, and what all pictures share."""
