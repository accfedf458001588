"""What every room may use and that uses none of them: errors, random streams, files that are whole or absent, texts."""
