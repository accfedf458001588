"""What was measured once, for a number on a page: README.md."""
