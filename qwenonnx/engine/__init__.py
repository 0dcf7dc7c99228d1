"""Generation: requests in, events out."""
