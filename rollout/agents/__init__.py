"""Chats of agents as exact token ids: a program between clients and the router.

One folder per role; each imports only from those above it:

wire/     OpenAI's chats: messages, images, requests
model/    a model's template, tokenizer and renderer, and how its answers are read
turns/    the turns of sessions, in memory and in files
worker/   one worker: its HTTP application, its life and its settings

plan.py          the prompt of a turn, and what is kept of its reply (pure)
answers.py       answers in OpenAI's form, whole and streamed (pure)
chats.py         one turn: planned, generated, written, answered
router_link.py   a worker's requests to its router
shares.py        threads that share the interpreter's lock between clients
"""
