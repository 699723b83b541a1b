"""Which blocks a query tile or a token attends to: scores of compressed keys, and the top k of them.

tile          blocks of a query tile, by the mean of its queries
token         blocks of a token, by the probabilities of the compressed branch
token_tiling  its work tiles and their shared memory
block_max     blocks of a token, by the best score of their keys: an indexer's choice
topk          sorted lists in shared memory
parts         lists that CTAs share
"""
