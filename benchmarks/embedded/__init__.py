"""The embedded engine beside transformers' continuous batching and llama.cpp's server.

__main__.py       what is measured, in turns
servers.py        the engine and llama.cpp's server as processes
llama_cpp.py      the program of llama.cpp's server, for an interpreter of its own
"""
