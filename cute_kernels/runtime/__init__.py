"""What all kernels need of the machine, and nothing of attention.

jit         compile kernels from fake tensors
disk_cache  keep compiled kernels in a folder
compiling   the lock around compilation
device      compute capability, alignment
replay      run a call from a recording of its launches
streams     side streams for chunks that do not depend on each other
"""
