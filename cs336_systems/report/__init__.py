"""Tables and pictures, made from the records of finished runs."""
