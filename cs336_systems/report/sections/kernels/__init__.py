"""Tables, sentences and pictures of where the time of a step went, kernel by kernel."""
