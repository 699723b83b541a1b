"""Block lists and worklists built from selections, as read by attention kernels.

query_to_kv        blocks of keys for each tile of query rows
kv_to_query        tiles of query rows for each block of keys, for backward
worklist           work tiles of the KV-outer kernels of token mode
selected_worklist  work tiles of attend/selected_backward.py
"""
