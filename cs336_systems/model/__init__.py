"""What a run times: the model, its optimizer and its batches, with named ranges."""
