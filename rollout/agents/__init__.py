"""Chats of agents as exact token ids: a program between clients and the router.

wire/       OpenAI's chats: what is read, and what is answered
model/      a model's template, tokenizer and calls
turns/      the turns of sessions
"""
