"""NVIDIA FLARE as the carrier of a federation: it authenticates, encrypts and delivers, and knows nothing of learning.

The server's fit and each institution's fit are processes of their own, and FLARE's processes hand their messages on.
"""
