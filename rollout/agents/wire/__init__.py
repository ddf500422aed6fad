"""Chats in OpenAI's form: messages, requests and answers."""
