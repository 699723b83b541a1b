"""Which blocks a query tile or a token attends to: scores of compressed keys, and the top k of them."""
