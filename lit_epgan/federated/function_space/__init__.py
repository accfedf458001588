"""Sites in function space: what a client knows, as samples or as mean embeddings of its data."""
