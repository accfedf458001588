"""A federation whose server and clients are processes of their own: what they say to each other, and who carries it.

The server's process runs the engine's rounds, and each client's process trains one client. Between them go bytes: what
``lit_epgan.engine.wire`` writes, and messages on where a round is. A socket carries them, or NVIDIA FLARE, which
authenticates, encrypts and delivers, and knows nothing of learning.
"""
