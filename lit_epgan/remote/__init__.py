"""A federation whose server and clients are processes of their own: what they say to each other, whoever carries it.

The server's process runs the engine's rounds, and each institution's process runs one client's tasks. Between them go
bytes: what ``lit_epgan.engine.wire`` writes, and messages on where a round is.
"""
