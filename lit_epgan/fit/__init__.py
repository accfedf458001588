"""A federation within a Lightning fit: its loop, its rounds, and its two ends where it runs in several processes."""
