"""What clients may submit, and the job that comes of it."""
