"""What is timed: the model, its optimizer, its batches, and the named ranges within them."""
