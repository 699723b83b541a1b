"""Block selection for query tiles and tokens: scores of compressed keys, and their top k.

tile          blocks of a query tile, by the mean of its queries
token         blocks of a token, by the probabilities of the compressed branch
token_tiling  work tiles of `token` and their shared memory
block_max     blocks of a token, by the best score of their keys: the choice of an indexer
topk          sorted lists in shared memory
parts         lists whose work is shared by several CTAs
"""
