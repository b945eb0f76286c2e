"""What lets SGLang serve and speculate on a machine without a GPU. Never active where one is present.

stand_in/sgl_kernel   plain torch forms of the few kernels that the CPU path calls
attention             a batched torch attention backend that can verify
install               the hooks
"""
