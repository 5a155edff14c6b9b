"""A Triton backend named `cpu` that compiles nothing.

vLLM asks Triton for a backend of the platform's name before it uses the model runner that TreeWY extends. Under
TRITON_INTERPRET=1 kernels run as Python, so no backend is ever asked to compile; this one only answers the questions
that come before. For tests only.
"""
