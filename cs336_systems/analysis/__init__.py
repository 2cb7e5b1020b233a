"""What the records and profiles say."""
