"""Methods x seeds: run, compared, and shown on one page."""
