"""What operators set and what clients may say, checked before anything runs."""
