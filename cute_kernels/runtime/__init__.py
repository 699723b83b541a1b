"""Machine support for all kernels, independent of attention.

dsl           CuTe DSL names that moved between its versions
jit           compile kernels from fake tensors
disk_cache    keep compiled kernels in a folder
compiling     the lock around compilation
device        compute capability, alignment
launches      the only way to launch, and its listeners
recorder      what a call launches, allocates and computes
replay        run a call from a recording
graphs        the same launches as a CUDA graph, if a call recurs at the same addresses
cuda_runtime  private streams, and graphs without memory pools
streams       side streams for chunks that do not depend on each other
"""
