"""What one offload and onload costs beyond the engines' own time, by number of engines.

engines.py    fake engines behind HTTP             (a process)
over_http.py  a cycle over them, by Ray actors, and by a client that calls them in sequence
in_memory.py  CPU of a cycle over fake engines of this process, up to 512
"""
