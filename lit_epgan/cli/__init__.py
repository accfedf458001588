"""The command line: its commands, a user's mistake in one sentence, and studies: methods x seeds on one page."""
