"""Other libraries' trainers on this library's engines, one folder each.

A trainer's library is imported only in its folder here, and only when something of it is used.
"""
