"""The command line: the commands themselves, and every mistake of the user in one sentence."""
