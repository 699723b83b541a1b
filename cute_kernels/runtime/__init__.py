"""What all kernels need of the machine, and nothing of attention.

dsl           names of CuTe DSL that moved between its versions
jit           compile kernels from fake tensors
disk_cache    keep compiled kernels in a folder
compiling     the lock around compilation
device        compute capability, alignment
launches      the one way to launch, and who is told of it
replay        run a call from a recording of its launches
graphs        the same launches as a CUDA graph, where a call comes again at the same addresses
cuda_runtime  streams of one's own, and graphs without memory
streams       side streams for chunks that do not depend on each other
"""
