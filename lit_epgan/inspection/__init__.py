"""Looking at data nobody may look at."""
